// What an engine knows of the other ranks: who takes part, how far they are, who lives, and who may be
// at whose buffers.

#include <poll.h>

#include <algorithm>

#include "engine.hpp"

namespace phalanx {

namespace {

// How long a rank that gives up waits for one in the middle of a share: that takes milliseconds, and
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

// Tells whether the members have come so far. One that was lost and gone on without never will: it
// is not waited for, but named in `undone`.
bool Engine::everybody(Counter Control::*counter, std::uint64_t needed, int* undone) {
  for (const int rank : members_) {
    const Counter& theirs = region_.control(rank).*counter;
    if (theirs.read() >= needed) continue;
    if (!is_forgotten(rank)) {
      watch_ = {&theirs, needed, counter, 0};
      for (const int member : members_)
        if (!is_forgotten(member)) watch_.members |= std::uint64_t{1} << member;
      return false;
    }
    if (undone != nullptr) *undone = rank;
  }
  return true;
}

// A rank that has given up may use its buffers for something else, until it goes on.
bool Engine::anybody_gave_up() {
  for (const int rank : members_) {
    const Counter& broken = region_.control(rank).broken;
    const std::uint64_t now = broken.read();
    // Nobody is at the buffers of one who has left: all that it took part in has ended.
    const bool left = region_.control(rank).left_at.read() != kNever;
    if (now % 2 == 0 || is_forgotten(rank) || left) continue;
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

void Engine::let_go_of_others() { mine_.touching.publish(mine_.touching.read() + 1); }

void Engine::wait_until_untouched() {
  const std::uint64_t until = now_ns() + kPatience;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Counter& touching = region_.control(rank).touching;
    while (rank != rank_ && touching.read() % 2 != 0 && !has_ended(rank) && now_ns() < until)
      yield_core();
  }
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
  if (pidfds_[rank] < 0) return false;
  pollfd poll{pidfds_[rank], POLLIN, 0};
  return ::poll(&poll, 1, 0) == 1;
}

bool Engine::is_source(const Request& request, int rank) const {
  switch (request.kind) {
    case Kind::broadcast:
    case Kind::scatter:
      return rank == request.root;
    case Kind::barrier:
    case Kind::none:
      return false;
    default:
      return true;
  }
}

}  // namespace phalanx
