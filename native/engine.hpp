// One rank of a group, and how it gets its operations done without a thread of its own.
//
// An operation is described, then announced by `arrived`; from then on the peers can see it, and the
// caller goes on. Whoever enters the engine next (the next call, a wait, a test) does this rank's
// share of every operation at which all members have arrived. The steps of one operation:
//
//   queued    -> announced   there is room in the ring, and a small input lies in its slot
//   announced -> shared      all members have arrived and agree; this rank has done its share
//   shared    -> finished    nobody needs this rank's buffers any more; the caller may touch them
//
// Operations take each step in order, alike on every rank, so counters are enough to synchronise.
//
// Data takes one of three ways, which all ranks choose alike from the descriptors:
//
//   small    every source put its input into a slot before it arrived; one round, no second wait
//   direct   every input lies in the region; ranks read each other's buffers where they are
//   windows  ordinary memory: piece by piece through a few windows that stay in the cache

#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "layout.hpp"
#include "reduce.hpp"
#include "region.hpp"
#include "sync.hpp"
#include "transfers.hpp"

namespace phalanx {

// What the caller wants done. Memory belongs to the caller and stays until the operation has ended.
struct Request {
  Kind kind = Kind::barrier;
  Reduction reduction{DType::uint8, ReduceOp::sum, 1.0};
  int root = 0;
  char* input = nullptr;         // contiguous; for allreduce, reduce and broadcast also the output
  std::size_t bytes = 0;         // of the input
  std::uint64_t extent = 0;      // elements or bytes; what all ranks must say alike
  std::vector<char*> outputs;    // one for each rank where the operation has several, else one
  std::size_t output_bytes = 0;  // of each of them; for alltoall of all together
  std::vector<std::uint64_t> send_at, receive_at;  // alltoall: where each rank's part begins
};

enum class Outcome : std::uint8_t { pending, finished, dead, mismatch, aborted };

struct Verdict {
  Outcome outcome = Outcome::pending;
  int first = -1;   // the dead rank, or one side of a mismatch
  int second = -1;  // the other side
};

class Engine {
 public:
  Engine(Region region, int rank, int cores);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Region& region() { return region_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Watches a peer through a descriptor that becomes readable when its process ends (a pidfd).
  void watch(int rank, int pidfd);

  // Queues an operation; returns the ticket to wait with. Tickets count up from 1.
  std::uint64_t issue(Request request);

  // Does what can be done now, and tells how the operation stands.
  Verdict test(std::uint64_t ticket);

  // Waits for an operation, at most for `nanoseconds`.
  Verdict wait(std::uint64_t ticket, std::uint64_t nanoseconds);

  // Sends and receives have tickets of their own. A receive from -1 takes what comes first.
  std::uint64_t send(int to, std::int64_t tag, const char* data, std::size_t bytes);
  std::uint64_t receive(int from, std::int64_t tag, char* data, std::size_t bytes);
  Transfers::Status test_transfer(std::uint64_t ticket);
  Transfers::Status wait_transfer(std::uint64_t ticket, std::uint64_t nanoseconds);
  void forget_transfer(std::uint64_t ticket);

  // Lists the ranks whose process has ended, whether anybody waits for them or not.
  std::vector<int> dead() const;

  // Takes part in nothing after what was issued so far.
  void leave();

  // Goes on without a rank that was found dead; all survivors must do so.
  void forget(int rank);

  // Ends every wait of this rank.
  void abort();

 private:
  friend class Shares;

  struct Operation {
    Request request;
    std::uint64_t sequence = 0;
    bool in_windows = false;
    bool direct = false;  // ranks read, and an all-reduce writes, each other's buffers in place
    std::uint64_t windows = 0;                     // how many it takes
    std::uint64_t filled = 0, worked = 0, finished = 0;  // of them, by this rank
  };

  // What this rank waits for: a counter of one peer, and of all others who are needed too.
  struct Watch {
    const Counter* counter = nullptr;
    std::uint64_t needed = 0;
    Counter Control::*which = nullptr;
    std::uint64_t members = 0;  // a bit for each
  };

  // All of these expect `mutex_` to be held.
  void progress();
  bool announce_next();
  bool share_next();
  bool finish_next();
  void describe(Operation& operation);
  bool agreed(const Operation& operation);
  bool expects(const Operation& operation, int rank) const;
  bool share(Operation& operation);
  bool run_windows(Operation& operation);
  void reduce_own_slice(const Operation& operation, std::uint64_t number, std::size_t from);
  void collect_slices(const Operation& operation, std::uint64_t number, std::size_t from);
  void refresh_members(std::uint64_t sequence);
  bool everybody(Counter Control::*counter, std::uint64_t needed);
  void publish(Counter Control::*counter, std::uint64_t value);
  Verdict verdict(std::uint64_t ticket) const;
  void look_for_dead();
  bool has_ended(int rank) const;

  const Descriptor& descriptor(int rank, std::uint64_t sequence) const {
    return region_.control(rank).ring[sequence % kRing];
  }
  bool is_source(const Request& request, int rank) const;

  Region region_;
  const int rank_;
  const int ranks_;
  const Pace pace_;
  Control& mine_;

  std::mutex mutex_;  // over everything below; held while progress is made, never while waiting
  std::deque<Operation> queue_;
  std::uint64_t issued_ = 0;
  std::uint64_t announced_ = 0;  // tickets and sequence numbers are the same
  std::uint64_t shared_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t windows_used_ = 0;
  std::vector<int> members_;  // of the operation at hand, in rank order
  std::uint64_t forgotten_ = 0;  // a bit for each rank that was lost and is gone on without
  Transfers transfers_;
  Watch watch_;
  Verdict failure_;
  int pidfds_[kMaxRanks];
};

}  // namespace phalanx
