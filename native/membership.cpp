// Membership of the other ranks: who takes part in an operation, how far they are, who is dead, and who
// may access whose buffers.

#include <algorithm>

#include "engine.hpp"

namespace phalanx {

namespace {

// How long an aborting rank waits for a peer in the middle of a piece, in nanoseconds. A piece takes
// microseconds; a stopped peer must not hold up the others.
constexpr std::uint64_t kAccessTimeout = 500'000'000;

}  // namespace

// A rank is a member of every operation before its `left_at`. That word is final once it is set, and a
// rank that has arrived has not left, so all ranks see the same members.
void Engine::refresh_members(std::uint64_t sequence) {
  members_.clear();
  for (int rank = 0; rank < ranks_; ++rank) {
    // The counters of a dead rank no longer change, so all survivors read the same.
    const bool lost = is_excluded(rank) && region_.control(rank).arrived.read() < sequence;
    if (!lost && region_.control(rank).left_at.read() > sequence) members_.push_back(rank);
  }
}

// Whether a counter of all members has reached `needed`. Excluded ranks are not waited for.
bool Engine::all_reached(Counter Control::*counter, std::uint64_t needed, int except) {
  for (const int rank : members_) {
    const Counter& theirs = region_.control(rank).*counter;
    if (rank == except || theirs.read() >= needed || is_excluded(rank)) continue;
    blocked_on_ = {&theirs, needed, counter, 0};
    for (const int member : members_)
      if (member != except && !is_excluded(member)) blocked_on_.members |= std::uint64_t{1} << member;
    return false;
  }
  return true;
}

// An aborted rank may use its buffers for other data until it resumes.
bool Engine::any_aborted() {
  for (const int rank : members_) {
    const Counter& abort_epoch = region_.control(rank).abort_epoch;
    const std::uint64_t now = abort_epoch.read();
    if (now % 2 == 0 || is_excluded(rank)) continue;
    // No rank accesses the buffers of one that has left: all its operations have ended.
    if (region_.control(rank).left_at.read() != kNever) continue;
    blocked_on_ = {&abort_epoch, now + 1, &Control::abort_epoch, std::uint64_t{1} << rank};
    return true;
  }
  return false;
}

// A rank publishes `access_epoch` before it reads the peers' `abort_epoch`; an aborting rank publishes
// `abort_epoch` before it reads `access_epoch`. In one total order at least one sees the other.
bool Engine::begin_access() {
  mine_.access_epoch.publish(mine_.access_epoch.read() + 1);
  if (!any_aborted()) return true;
  end_access();
  return false;
}

// Repeats the check after each piece, so that a rank that was stopped in the middle of one continues at
// most to its end. The epoch advances to show that the piece is stored. If a peer aborts before this
// check, the piece just read may contain what it has overwritten. If it dies, the operation is torn; if
// it resumes, it takes part with the current contents of its buffer.
bool Engine::continue_access() {
  mine_.access_epoch.publish(mine_.access_epoch.read() + 2);
  return !any_aborted();
}

void Engine::end_access() { mine_.access_epoch.publish(mine_.access_epoch.read() + 1); }

// Waits until no peer is in the middle of a piece. After `abort_epoch` is odd a peer completes at most
// the current piece, so it is enough to see its epoch advance.
void Engine::wait_for_accesses() {
  const std::uint64_t until = now_ns() + kAccessTimeout;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Counter& access_epoch = region_.control(rank).access_epoch;
    const std::uint64_t seen = access_epoch.read();
    if (rank == rank_ || seen % 2 == 0) continue;
    while (access_epoch.read() == seen && !has_exited(rank)) {
      if (now_ns() >= until) {
        unfinished_access_[rank].store(seen, std::memory_order_release);
        has_unfinished_access_.store(true, std::memory_order_release);
        break;
      }
      yield_core();
    }
  }
}

bool Engine::is_quiescent() const {
  if (!has_unfinished_access_.load(std::memory_order_acquire)) return true;
  for (int rank = 0; rank < ranks_; ++rank) {
    const std::uint64_t seen = unfinished_access_[rank].load(std::memory_order_acquire);
    if (seen != 0 && region_.control(rank).access_epoch.read() == seen && !has_exited(rank))
      return false;
  }
  return true;
}

// Whether an excluded rank died before its counter reached `needed`.
bool Engine::died_before(int rank, Counter Control::*counter, std::uint64_t needed) const {
  return is_excluded(rank) && (region_.control(rank).*counter).read() < needed;
}

// Returns a rank that the operation needs and that is not a member, or -1. All members return the same.
int Engine::missing_rank(const Request& request) const {
  switch (request.kind) {
    case Collective::reduce:
    case Collective::broadcast:
    case Collective::gather:
    case Collective::scatter:
      return is_member(request.root) ? -1 : request.root;
    case Collective::ordered_allreduce:
      for (int rank = 0; rank < ranks_; ++rank)
        if (!is_member(rank)) return rank;
      return -1;
    default:
      return -1;
  }
}

// Returns a root that accesses no peer's buffers, or -1. Its input is complete when it has arrived, so
// nobody has to wait for it to be done.
int Engine::idle_root(const Operation& operation) const {
  const Collective kind = operation.request.kind;
  const bool hands_out = kind == Collective::broadcast || kind == Collective::scatter;
  return hands_out && !operation.root_assists ? operation.request.root : -1;
}

// Returns the rank that tore a direct operation, or -1. All survivors return the same, since they look
// when every member that counts is done or excluded, and at words that no longer change:
//
//   `done` of the dead. A dead rank leaves others' results incomplete only where it stores into their
//   buffers.
//
//   `excluded_since` of those that are done. A rank that aborted before it died may have overwritten its
//   buffer. A reader that was done before it excluded that rank checked after its last piece that the
//   rank had not aborted, so it has read the right input. A later reader may have read anything, and
//   records that in `excluded_since` before it publishes `done`. What the dead rank knew when it aborted
//   would not do: it may have died before it could publish it.
int Engine::torn_by(const Operation& operation) const {
  const Request& request = operation.request;
  for (const int rank : members_) {
    const bool stores = request.kind == Collective::allreduce ||
                        request.kind == Collective::ordered_allreduce ||
                        (operation.root_assists && rank == request.root);
    if (stores && died_before(rank, &Control::done, operation.sequence)) return rank;
  }
  for (const int reader : members_) {
    const Control& theirs = region_.control(reader);
    if (reader == idle_root(operation)) continue;
    if (theirs.exclusions.read() == 0 || theirs.done.read() < operation.sequence) continue;
    for (const int rank : members_) {
      const std::uint64_t since = theirs.excluded_since[rank].load(std::memory_order_acquire);
      if (since != 0 && since <= operation.sequence && is_source(request, rank)) return rank;
    }
  }
  return -1;
}

bool Engine::is_member(int rank) const {
  return std::find(members_.begin(), members_.end(), rank) != members_.end();
}

void Engine::publish(Counter Control::*counter, std::uint64_t value) {
  (mine_.*counter).publish(value);
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) wake(region_.control(rank).peer_wait);
}

// Checks all ranks that progress is blocked on, since the first of them may be alive and late. The
// counter is read after the death is known and is final then: what a rank did before it died counts.
void Engine::check_for_deaths() {
  if (failure_.outcome != Outcome::pending || blocked_on_.counter == nullptr) return;
  for (int rank = 0; rank < ranks_; ++rank) {
    const bool needed = rank != rank_ && (blocked_on_.members >> rank & 1) != 0;
    if (!needed || !has_exited(rank)) continue;
    if ((region_.control(rank).*blocked_on_.field).read() < blocked_on_.needed) {
      failure_ = {Outcome::dead, rank, -1};
      return;
    }
  }
}

bool Engine::has_exited(int rank) const {
  return processes_[rank] != nullptr && processes_[rank]->has_exited();
}

bool Engine::is_source(const Request& request, int rank) const {
  switch (request.kind) {
    case Collective::broadcast:
    case Collective::scatter:
      return rank == request.root;
    case Collective::barrier:
      return false;
    default:
      return true;
  }
}

}  // namespace phalanx
