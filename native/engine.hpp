// One rank of a group.
//
// The engine has no thread of its own; `driver.hpp` adds one where there are cores to spare.
//
// A call describes its operation and publishes `arrived`. From then on peers can see it, and the call
// returns. Whoever enters the engine next (the next call, a wait, a test) executes this rank's part of
// every operation at which all members have arrived. The states of an operation:
//
//   queued    -> announced   the ring has room, and a small input has been copied to its slot
//   announced -> executed    all members have arrived and agree; this rank has done its part
//   executed  -> finished    no peer needs this rank's buffers any more
//
// Operations change state in order, and in the same order on every rank, so counters are enough to
// synchronise.
//
// Data takes one of three paths. All ranks derive the same choice from the descriptors:
//
//   small    every source copied its input to a slot before it arrived: one round, no second wait
//   direct   every input is in the region: ranks access each other's buffers in place
//   windows  ordinary memory: copied piece by piece through a few windows that stay in the cache

#pragma once

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "copy.hpp"
#include "region_layout.hpp"
#include "reduce.hpp"
#include "region.hpp"
#include "sync.hpp"
#include "transfers.hpp"

namespace phalanx {

// The process of a peer. All engines of this process that have a rank in it share one object.
class Process {
 public:
  explicit Process(int pidfd) : pidfd_(pidfd) {}  // takes ownership
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() { ::close(pidfd_); }

  bool has_exited() const {
    pollfd poll{pidfd_, POLLIN, 0};  // a pidfd becomes readable when its process ends
    return ::poll(&poll, 1, 0) == 1;
  }

 private:
  const int pidfd_;
};

// The order of an ordered all-reduce (see `sum_tree`). Every rank has memory for one slot more than the
// rank with most inputs has inputs. The first slot is for the result; inputs are never written, so they
// are intact whatever becomes of the operation.
struct Tree {
  std::vector<std::uint16_t> inputs;  // of each rank, in its slots from the second on
  std::vector<std::uint8_t> merges;   // over the inputs of rank 0, then of rank 1...
  std::size_t slot_bytes = 0;         // from the beginning of one slot to the next
};

// An operation to issue. The caller owns the memory and keeps it until the operation has ended.
struct Request {
  Collective kind = Collective::barrier;
  Reduction reduction{DType::uint8, ReduceOp::sum, 1.0};
  int root = 0;
  char* input = nullptr;          // contiguous; for allreduce, reduce and broadcast also the output
  std::size_t bytes = 0;          // of the input
  std::uint64_t fingerprint = 0;  // must be equal on all ranks
  std::vector<char*> outputs;     // one per rank where the operation has several, else one
  std::size_t output_bytes = 0;   // of each output; for alltoall of all together
  std::vector<std::uint64_t> send_at, receive_at;  // alltoall: where each rank's part begins
  // Of ordered_allreduce, whose `reduction.factor` is the divisor. The input is all slots but the first,
  // which is the output.
  std::shared_ptr<const Tree> tree;
};

// `root_left` and `torn` end one operation, with the same result on every rank; the group continues.
// The numbers are exported to Python.
enum class Outcome : std::uint8_t {
  pending,
  finished,
  dead,
  mismatch,
  aborted,
  root_left,  // or of an ordered all-reduce any rank
  torn,       // a rank died during the operation and was excluded
};

struct Result {
  Outcome outcome = Outcome::pending;
  int first = -1;   // the dead or departed rank, or one side of a mismatch
  int second = -1;  // the other side of a mismatch
};

class Driver;

// Functions that return a ticket, a vector or an engine throw `std::bad_alloc` without having changed
// anything. Progress on issued operations never allocates.
class Engine {
 public:
  Engine(Region region, int rank, int cores);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Region& region() { return region_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Sets the number of cores that all ranks share. To be called before the first operation.
  void set_cores(int cores);
  int cores() const { return cores_; }

  // Detects the end of a peer's process.
  void watch(int rank, std::shared_ptr<const Process> process);

  // Tells the peers that this rank has mapped the region and is ready.
  void mark_present();

  // Starts a thread that makes progress in the background, before the first operation; stops it.
  void start_driver();
  void stop_driver();
  bool has_driver() const;

  // Queues an operation and returns its ticket. Tickets count up from 1.
  std::uint64_t issue(Request request);

  // Returns why an ordered all-reduce must not be issued, or null. Its slots have to be small or in the
  // region: there is no path through windows.
  const char* tree_error(const Request& request) const;

  // Issues without blocking. The ticket is 0, and nothing has changed, if another thread holds the
  // engine or it has failed. `more` says that work is left which may take long; `test` does it.
  struct Issued {
    std::uint64_t ticket = 0;
    bool more = false;
  };
  Issued try_issue(Request request);

  // Whether an operation has finished and none has failed; takes no lock.
  bool has_succeeded(std::uint64_t ticket) const;

  // Makes progress without waiting and returns the state of an operation.
  Result test(std::uint64_t ticket);

  // Waits for an operation, at most for `nanoseconds`.
  Result wait(std::uint64_t ticket, std::uint64_t nanoseconds);

  // Sends and receives have tickets of their own. A receive from -1 accepts any sender.
  std::uint64_t send(int to, std::int64_t tag, const char* data, std::size_t bytes);
  std::uint64_t receive(int from, std::int64_t tag, char* data, std::size_t bytes);
  Transfers::Status test_transfer(std::uint64_t ticket, bool waits = false);
  Transfers::Status wait_transfer(std::uint64_t ticket, std::uint64_t nanoseconds);
  void detach_transfer(std::uint64_t ticket);
  bool cancel_transfer(std::uint64_t ticket);
  std::size_t transfers_kept();

  // Returns the ranks whose process has ended.
  std::vector<int> dead_ranks() const;

  // Returns the current members, as far as this rank knows.
  std::vector<int> members() const;

  // Leaves the group after the operations issued so far. Returns false, with nothing changed, if one
  // of them has not ended: peers do not serve a rank that has left.
  bool leave();

  enum class RejoinStage : std::uint8_t {  // exported to Python
    outside,
    waiting,   // for all ranks to start rejoining
    entering,  // a member; waiting for all ranks to be members
    entered,
  };
  struct RejoinStatus {
    Result result;
    RejoinStage stage = RejoinStage::outside;
    std::uint64_t calls = 0;  // the maximum over all ranks, once all have started
  };

  // Becomes a member again, together with all living ranks, all of which have left. Takes one step, or
  // waits for it at most for `nanoseconds`; to be called until the stage is `entered`. A rank may stop
  // and continue later at any stage. `calls` is the number of calls that the group has counted here.
  RejoinStatus rejoin(std::uint64_t calls, std::uint64_t nanoseconds);

  // Returns the ranks that `rejoin` waits for.
  std::vector<int> missing_in_rejoin();

  // Continues without a dead rank; all survivors must do so. Operations at which it had not arrived
  // continue among the survivors; those that it left incomplete are torn.
  void exclude(int rank);

  // Ends every wait of this rank and keeps peers out of its buffers until it resumes. Does not wait
  // for a peer that is stopped in the middle of a piece: see `is_quiescent`.
  void abort();

  // Whether no peer is still in the middle of a piece that `abort` did not wait for. Such a peer
  // stores into this rank's buffers when its process continues. Takes no lock.
  bool is_quiescent() const;

 private:
  friend class Driver;
  friend class Executor;

  struct FailedOperation {
    std::uint64_t sequence = 0;
    Result result;
  };

  struct Operation {
    Request request;
    std::list<FailedOperation> failure;  // one preallocated node, kept if the operation fails
    std::uint64_t sequence = 0;
    bool in_windows = false;
    bool direct = false;        // peers access this rank's buffers in place
    bool root_assists = false;  // broadcast: the root stores a part into the receivers' buffers
    std::size_t done_bytes = 0;     // of a direct operation, in whole pieces
    std::uint64_t windows = 0;      // needed in total
    std::uint64_t filled = 0, processed = 0, released = 0;  // windows, by this rank

    void reset() {  // all but what every use sets
      in_windows = direct = root_assists = false;
      done_bytes = windows = filled = processed = released = 0;
    }
  };

  // The counter that progress is blocked on: `counter` is that of one peer; `field` of all `members`
  // has to reach `needed`.
  struct BlockedOn {
    const Counter* counter = nullptr;
    std::uint64_t needed = 0;
    Counter Control::*field = nullptr;
    std::uint64_t members = 0;  // one bit per rank
  };

  using Operations = std::list<Operation>;

  // Moves a request into the first spare operation, which is allocated if there is none. If it throws,
  // it has moved nothing.
  static void prepare(Operations& spare, Request&& request);

  // All of these expect `mutex_` to be held.
  void progress() noexcept;
  bool step() noexcept;                     // of `progress`; returns whether anything moved
  void enqueue(Operations& from) noexcept;  // moves the first of a list
  void retire_first() noexcept;
  bool announce_next();
  bool execute_next();
  bool finish_next();
  void describe(Operation& operation);
  bool matches_peers(const Operation& operation);
  bool sizes_match(const Operation& operation, int rank) const;
  bool execute(Operation& operation);
  bool is_member(int rank) const;
  bool is_excluded(int rank) const { return (excluded_ >> rank & 1) != 0; }
  bool any_aborted();
  bool begin_access();
  bool continue_access();
  void end_access();
  void wait_for_accesses();
  bool died_before(int rank, Counter Control::*counter, std::uint64_t needed) const;
  int missing_rank(const Request& request) const;
  int idle_root(const Operation& operation) const;
  int torn_by(const Operation& operation) const;
  void mark_failed(Operation& operation, Outcome outcome, int rank);
  template <class Piece>
  bool for_each_piece(Operation& operation, std::size_t length, Piece&& piece);
  bool execute_direct(Operation& operation, std::size_t longest);
  bool sum_tree_directly(Operation& operation);
  bool bypasses_cache(const Request& request, std::size_t longest) const;
  bool broadcast(Operation& operation, std::size_t bytes);
  bool run_windows(Operation& operation);
  std::size_t member_index() const;
  void fill_window(const Operation& operation, std::uint64_t number, std::size_t from);
  void reduce_own_slice(const Operation& operation, std::uint64_t number, std::size_t from);
  void collect_slices(const Operation& operation, std::uint64_t number, std::size_t from);
  bool advance_rejoin(std::uint64_t calls);  // one step of `rejoin`; returns whether it was taken
  RejoinStage stage() const;
  std::vector<int> late_ranks() const;
  std::uint64_t max_over_ranks(Counter Control::*counter) const;
  void adopt_counters();
  void publish_rejoin_step(std::uint64_t value);
  void refresh_members(std::uint64_t sequence);
  bool all_reached(Counter Control::*counter, std::uint64_t needed, int except = -1);
  void publish(Counter Control::*counter, std::uint64_t value);
  Result result_of(std::uint64_t ticket) const;
  void check_for_deaths();
  void progress_briefly();  // with a driver
  void notify_driver();

  RejoinStatus rejoin_status(Result result);  // takes the lock
  Result peek(std::uint64_t ticket);          // does not wait for the lock

  bool is_small(const Request& request) const;
  bool is_source(const Request& request, int rank) const;
  bool has_exited(int rank) const;
  const Descriptor& descriptor(int rank, std::uint64_t sequence) const {
    return region_.control(rank).ring[sequence % kRingSize];
  }

  Region region_;
  const int rank_;
  const int ranks_;
  int cores_;
  SpinPolicy spin_policy_;
  Control& mine_;

  // Copies for readers without the lock: `finished_`, and whether `failed_` has entries. A reader of
  // the first may use the memory of finished operations, so it is stored with release and loaded with
  // acquire order, on which the second relies too.
  std::atomic<std::uint64_t> visible_finished_{0};
  std::atomic<bool> any_failed_{false};

  // For each rank that `abort` did not wait for: its `access_epoch` at that time, else 0.
  std::atomic<std::uint64_t> unfinished_access_[kMaxRanks]{};
  std::atomic<bool> has_unfinished_access_{false};

  // Protects everything below. Held during progress, never during a wait. Taken before the lock of the
  // driver's inbox.
  std::mutex mutex_;
  Operations queue_;
  Operations::iterator to_announce_ = queue_.end(), to_execute_ = queue_.end();
  Operations spare_;
  std::uint64_t issued_ = 0;     // tickets and sequence numbers are the same
  std::uint64_t announced_ = 0;
  std::uint64_t executed_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t windows_used_ = 0;
  bool rejoining_ = false;
  std::uint64_t agreed_calls_ = 0;
  AdaptiveCopier copier_;
  std::vector<int> members_;  // of the current operation, in rank order
  std::uint64_t excluded_ = 0;  // one bit per rank
  std::list<FailedOperation> failed_;  // in order of their sequence numbers
  Transfers transfers_;
  BlockedOn blocked_on_;
  Result failure_;
  std::shared_ptr<const Process> processes_[kMaxRanks];
  std::unique_ptr<Driver> driver_;  // set before the first operation or never; destroyed first
};

}  // namespace phalanx
