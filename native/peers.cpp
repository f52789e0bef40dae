// What an engine knows of the other ranks: who takes part, how far they are, who lives, and who may be
// at whose buffers.

#include <algorithm>

#include "engine.hpp"

namespace phalanx {

namespace {

// How long a rank that gives up waits for one in the middle of a piece: that takes microseconds, and
// one that is stopped there must not hold up the rest.
constexpr std::uint64_t kPatience = 500'000'000;

}  // namespace

// A rank is a member of every operation before the one that it left at. That word is final once it
// is set, and a rank that has arrived has not left, so all ranks see the same members.
void Engine::refresh_members(std::uint64_t sequence) {
  members_.clear();
  for (int rank = 0; rank < ranks_; ++rank) {
    // What a dead rank had said before it died, it said to everybody: its words are frozen.
    const bool lost = is_forgotten(rank) && region_.control(rank).arrived.read() < sequence;
    if (!lost && region_.control(rank).left_at.read() > sequence) members_.push_back(rank);
  }
}

// Tells whether the members have come so far. One that was lost and gone on without never will, and is
// not waited for.
bool Engine::everybody(Counter Control::*counter, std::uint64_t needed, int but) {
  for (const int rank : members_) {
    const Counter& theirs = region_.control(rank).*counter;
    if (rank == but || theirs.read() >= needed || is_forgotten(rank)) continue;
    watch_ = {&theirs, needed, counter, 0};
    for (const int member : members_)
      if (member != but && !is_forgotten(member)) watch_.members |= std::uint64_t{1} << member;
    return false;
  }
  return true;
}

// A rank that has given up may use its buffers for something else, until it goes on.
bool Engine::anybody_gave_up() {
  for (const int rank : members_) {
    const Counter& broken = region_.control(rank).broken;
    const std::uint64_t now = broken.read();
    if (now % 2 == 0 || is_forgotten(rank)) continue;
    // Nobody is at the buffers of one who has left: all that it took part in has ended.
    if (region_.control(rank).left_at.read() != kNever) continue;
    watch_ = {&broken, now + 1, &Control::broken, std::uint64_t{1} << rank};
    return true;
  }
  return false;
}

// Whoever is about to touch others' buffers says so before it looks who has given up; whoever gives
// up says so before it looks who touches. In one total order at least one sees the other.
bool Engine::reach_for_others() {
  mine_.touching.publish(mine_.touching.read() + 1);
  if (!anybody_gave_up()) return true;
  let_go_of_others();
  return false;
}

// The same again after each piece: whoever was stopped in the middle of one, for however long, goes
// no further than its end. The word moves, so that who waits can tell that the piece is stored. If a
// rank gives up before this look, the piece just read may hold what it has overwritten. If it dies, the
// operation is torn; if it goes on, it takes part with what it has there now.
bool Engine::may_touch_more() {
  mine_.touching.publish(mine_.touching.read() + 2);
  return !anybody_gave_up();
}

void Engine::let_go_of_others() { mine_.touching.publish(mine_.touching.read() + 1); }

// Waits until nobody is in the middle of a piece. One piece more, after `broken` is odd, is all that
// anybody does, so it is enough to see the word move.
void Engine::wait_until_untouched() {
  const std::uint64_t until = now_ns() + kPatience;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Counter& touching = region_.control(rank).touching;
    const std::uint64_t seen = touching.read();
    if (rank == rank_ || seen % 2 == 0) continue;
    while (touching.read() == seen && !has_ended(rank)) {
      if (now_ns() >= until) {
        in_the_middle_[rank].store(seen, std::memory_order_release);
        was_touched_.store(true, std::memory_order_release);
        break;
      }
      yield_core();
    }
  }
}

bool Engine::is_untouched() const {
  if (!was_touched_.load(std::memory_order_acquire)) return true;
  for (int rank = 0; rank < ranks_; ++rank) {
    const std::uint64_t seen = in_the_middle_[rank].load(std::memory_order_acquire);
    if (seen != 0 && region_.control(rank).touching.read() == seen && !has_ended(rank)) return false;
  }
  return true;
}

// Tells whether a rank was lost before it came so far.
bool Engine::fell_short(int rank, Counter Control::*counter, std::uint64_t needed) const {
  return is_forgotten(rank) && (region_.control(rank).*counter).read() < needed;
}

// Finds a root that touches nobody's buffers, -1 if there is none: what it had to bring is there when it has
// arrived, and whether it does its share makes no difference.
int Engine::idle_root(const Operation& operation) const {
  const Kind kind = operation.request.kind;
  const bool hands_out = kind == Kind::broadcast || kind == Kind::scatter;
  return hands_out && !operation.helped ? operation.request.root : -1;
}

// Finds the rank that tore a direct operation, -1 if nobody has. All survivors find the same, for they
// look when every member that counts is done or gone on without, and at words that do not change any more:
//
//   `done` of the dead: what a lost rank leaves undone is its own, but where it stores into the
//   others' buffers;
//
//   `without` of those who are done, for a rank that gave up before it died may have used its buffer
//   for something else meanwhile. Who did its share before it went on without that rank found it not to
//   have given up even afterwards, and so has read what it brought. Who did it later may have read
//   anything. It says so in `without` before it says that it is done, whereas what the dead rank knew of
//   the others when it gave up would not do: it may have died before it could say so.
int Engine::torn_by(const Operation& operation) const {
  const Request& request = operation.request;
  for (const int rank : members_) {
    const bool stores = request.kind == Kind::allreduce || (operation.helped && rank == request.root);
    if (stores && fell_short(rank, &Control::done, operation.sequence)) return rank;
  }
  for (const int reader : members_) {
    const Control& theirs = region_.control(reader);
    if (reader == idle_root(operation)) continue;
    if (theirs.bereaved.read() == 0 || theirs.done.read() < operation.sequence) continue;
    for (const int rank : members_) {
      const std::uint64_t since = theirs.without[rank].load(std::memory_order_acquire);
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
    if (rank != rank_) wake(region_.control(rank).bed);
}

// Only ranks that are waited for matter, but all of them: the one in front may be alive and late. A
// dead rank's words do not change any more, so they are read again after its death is known: what it
// did before it died counts.
void Engine::look_for_dead() {
  if (failure_.outcome != Outcome::pending || watch_.counter == nullptr) return;
  for (int rank = 0; rank < ranks_; ++rank) {
    const bool needed = rank != rank_ && (watch_.members >> rank & 1) != 0;
    if (!needed || !has_ended(rank)) continue;
    if ((region_.control(rank).*watch_.which).read() < watch_.needed) {
      failure_ = {Outcome::dead, rank, -1};
      return;
    }
  }
}

bool Engine::has_ended(int rank) const {
  return processes_[rank] != nullptr && processes_[rank]->has_ended();
}

bool Engine::is_source(const Request& request, int rank) const {
  switch (request.kind) {
    case Kind::broadcast:
    case Kind::scatter:
      return rank == request.root;
    case Kind::barrier:
      return false;
    default:
      return true;
  }
}

}  // namespace phalanx
