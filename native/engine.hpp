// One rank of a group, and how it gets its operations done without a thread of its own; one that
// has a thread as well lets it do the same in the background (`driver.hpp`).
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

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "copy.hpp"
#include "layout.hpp"
#include "process.hpp"
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

// The last two are of one operation and alike on every rank; the group goes on after them.
enum class Outcome : std::uint8_t {
  pending,
  finished,
  dead,
  mismatch,
  aborted,
  rootless,  // its root had left
  torn,      // a rank died in the middle of it, and was gone on without
};

struct Verdict {
  Outcome outcome = Outcome::pending;
  int first = -1;   // the dead or absent rank, or one side of a mismatch
  int second = -1;  // the other side
};

class Driver;

// Memory may run out in any of these that returns a ticket, a vector or an engine: then it throws
// `std::bad_alloc` and nothing has happened. Everything that goes on with operations once they are
// issued allocates nothing.
class Engine {
 public:
  Engine(Region region, int rank, int cores);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Region& region() { return region_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Says how many cores the ranks have between them, before anything is issued.
  void share_cores(int cores);
  int cores() const { return cores_; }

  // Notices when the process of a peer ends.
  void watch(int rank, std::shared_ptr<const Process> process);

  // Tells the others that this rank has mapped the region and lacks nothing: they may begin.
  void mark_present();

  // Has a thread do this rank's share in the background, before anything is issued; and ends it.
  void start_driver();
  void stop_driver();
  bool has_driver() const;

  // Queues an operation; returns the ticket to wait with. Tickets count up from 1.
  std::uint64_t issue(Request request);

  // The same for who has moments only: the ticket is 0, and nothing done, while another thread is at
  // the engine or it has failed; shares that may take longer are left for `test`, if `more` says so.
  struct Issued {
    std::uint64_t ticket = 0;
    bool more = false;
  };
  Issued try_issue(Request request);

  // Tells whether an operation has ended and none has ended badly; takes no lock.
  bool ended_well(std::uint64_t ticket) const;

  // Does what can be done now, and tells how the operation stands.
  Verdict test(std::uint64_t ticket);

  // Waits for an operation, at most for `nanoseconds`.
  Verdict wait(std::uint64_t ticket, std::uint64_t nanoseconds);

  // Sends and receives have tickets of their own. A receive from -1 takes what comes first.
  std::uint64_t send(int to, std::int64_t tag, const char* data, std::size_t bytes);
  std::uint64_t receive(int from, std::int64_t tag, char* data, std::size_t bytes);
  Transfers::Status test_transfer(std::uint64_t ticket, bool waits = false);
  Transfers::Status wait_transfer(std::uint64_t ticket, std::uint64_t nanoseconds);
  void forget_transfer(std::uint64_t ticket);
  bool cancel_transfer(std::uint64_t ticket);
  std::size_t transfers_kept();

  // Lists the ranks whose process has ended, whether anybody waits for them or not.
  std::vector<int> dead() const;

  // Lists the ranks that take part in what comes next, as far as is known.
  std::vector<int> members() const;

  // Takes part in nothing after what was issued so far. All of that must have ended: the others
  // do not look after a rank that has left. Returns whether it had.
  bool leave();

  // How far a rank that has left has come back.
  enum class Stage : std::uint8_t {
    outside,
    waiting,   // for all to come
    entering,  // it has its place; for all to have theirs
    entered,
  };
  struct Entry {
    Verdict verdict;
    Stage stage = Stage::outside;
    std::uint64_t calls = 0;  // of all the most, once all have come
  };

  // Becomes a member again, together with all who live, all of whom have left. Takes one step if it
  // can, or waits for it, at most for `nanoseconds`; to be called until the rank has entered. May be
  // given up and gone on with at any point. `calls` is what the group has counted here.
  Entry rejoin(std::uint64_t calls, std::uint64_t nanoseconds);

  // Lists the ranks that this one waits for in `rejoin`.
  std::vector<int> awaited();

  // Goes on without a rank that was found dead; all survivors must do so. What it took no part in
  // goes on among the rest, what it left undone is torn.
  void forget(int rank);

  // Ends every wait of this rank, and keeps the others from its buffers until it goes on. A rank that
  // is stopped in the middle of a piece is not waited for: see `is_untouched`.
  void abort();

  // Tells whether nobody is still in the middle of a piece that `abort` could not wait for, and that
  // will be stored into this rank's buffers when its process goes on. Takes no lock.
  bool is_untouched() const;

 private:
  friend class Driver;
  friend class Shares;

  struct Ending {
    std::uint64_t sequence = 0;
    Verdict verdict;
  };

  struct Operation {
    Request request;
    std::list<Ending> ending;  // one, to be kept if it does not end well
    std::uint64_t sequence = 0;
    bool in_windows = false;
    bool direct = false;  // ranks read, and an all-reduce writes, each other's buffers in place
    bool helped = false;  // a broadcast whose root stores a part into the others' buffers
    std::size_t reached = 0;  // bytes of a direct share that are done, in whole pieces
    std::uint64_t windows = 0;                     // how many it takes
    std::uint64_t filled = 0, worked = 0, finished = 0;  // of them, by this rank

    void begin_anew() {  // but for what every use sets
      in_windows = direct = helped = false;
      reached = windows = filled = worked = finished = 0;
    }
  };

  // What this rank waits for: a counter of one peer, and of all others who are needed too.
  struct Watch {
    const Counter* counter = nullptr;
    std::uint64_t needed = 0;
    Counter Control::*which = nullptr;
    std::uint64_t members = 0;  // a bit for each
  };

  using Operations = std::list<Operation>;

  // Puts a request into a spare place, of which there is one afterwards if there was none. May throw,
  // and has moved nothing then.
  static void prepare(Operations& spare, Request&& request);

  // All of these expect `mutex_` to be held.
  void progress() noexcept;
  bool step() noexcept;  // of progress; whether anything moved
  void enqueue(Operations& from) noexcept;  // the first of a list
  void retire_first() noexcept;
  bool announce_next();
  bool share_next();
  bool finish_next();
  void describe(Operation& operation);
  bool agreed(const Operation& operation);
  bool expects(const Operation& operation, int rank) const;
  bool share(Operation& operation);
  bool is_member(int rank) const;
  bool is_forgotten(int rank) const { return (forgotten_ >> rank & 1) != 0; }
  bool anybody_gave_up();
  bool reach_for_others();
  bool may_touch_more();
  void let_go_of_others();
  void wait_until_untouched();
  bool fell_short(int rank, Counter Control::*counter, std::uint64_t needed) const;
  int idle_root(const Operation& operation) const;
  int torn_by(const Operation& operation) const;
  void spoil(Operation& operation, Outcome outcome, int rank);
  template <class Piece>
  bool in_pieces(Operation& operation, std::size_t length, Piece&& piece);
  bool share_in_place(Operation& operation, std::size_t longest);
  bool streams(const Request& request, std::size_t longest) const;
  bool broadcast(Operation& operation, std::size_t bytes);
  bool run_windows(Operation& operation);
  std::size_t own_part() const;
  void fill_window(const Operation& operation, std::uint64_t number, std::size_t from);
  void reduce_own_slice(const Operation& operation, std::uint64_t number, std::size_t from);
  void collect_slices(const Operation& operation, std::uint64_t number, std::size_t from);
  bool come_back(std::uint64_t calls);  // one step of `rejoin`; whether it was taken
  Stage stage() const;
  std::vector<int> late_ranks() const;
  std::uint64_t greatest(Counter Control::*counter) const;
  void take_place();
  void publish_entry(std::uint64_t value);
  void refresh_members(std::uint64_t sequence);
  bool everybody(Counter Control::*counter, std::uint64_t needed, int but = -1);
  void publish(Counter Control::*counter, std::uint64_t value);
  Verdict verdict(std::uint64_t ticket) const;
  void look_for_dead();

  Entry at_stage(Verdict verdict);  // takes the lock

  // With a driver; the first two expect `mutex_` to be held, the others do not wait for it.
  void be_brief();
  void nudge();
  bool is_small(const Request& request) const;
  Verdict look(std::uint64_t ticket);

  bool has_ended(int rank) const;

  const Descriptor& descriptor(int rank, std::uint64_t sequence) const {
    return region_.control(rank).ring[sequence % kRing];
  }
  bool is_source(const Request& request, int rank) const;

  Region region_;
  const int rank_;
  const int ranks_;
  int cores_;
  Pace pace_;
  Control& mine_;

  // For those who would not wait for the lock: `finished_`, and whether `spoiled_` holds anything.
  // Who reads the first may touch the memory of what has finished, so it is stored with release and
  // read with acquire semantics, which the second relies on too.
  std::atomic<std::uint64_t> ended_{0};
  std::atomic<bool> spoilt_{false};

  // Of each rank that `abort` could not wait for: its `touching` then, else 0. And whether there are any.
  std::atomic<std::uint64_t> in_the_middle_[kMaxRanks]{};
  std::atomic<bool> was_touched_{false};

  // Over everything below; held while progress is made, never while waiting. The driver's lock over
  // its inbox comes after it.
  std::mutex mutex_;
  Operations queue_;
  Operations::iterator to_announce_ = queue_.end(), to_share_ = queue_.end();  // the next; or the end
  Operations spare_;  // places for operations to come
  std::uint64_t issued_ = 0;
  std::uint64_t announced_ = 0;  // tickets and sequence numbers are the same
  std::uint64_t shared_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t windows_used_ = 0;
  bool coming_back_ = false;  // in the middle of `rejoin`
  std::uint64_t agreed_calls_ = 0;
  Packer packer_;
  std::vector<int> members_;  // of the operation at hand, in rank order
  std::uint64_t forgotten_ = 0;  // a bit for each rank that was lost and is gone on without
  std::list<Ending> spoiled_;  // of operations that ended, but not well, in their order
  Transfers transfers_;
  Watch watch_;
  Verdict failure_;
  std::shared_ptr<const Process> processes_[kMaxRanks];
  std::unique_ptr<Driver> driver_;  // set before the first operation, or never; ends before the rest
};

}  // namespace phalanx
