// How ranks that have left become members again: all together, at numbers that all agree on.
//
// Everybody who lives has left, so no operation is under way anywhere and nobody looks at who is a
// member. Each rank counts two steps in its `entry`:
//
//   odd    it has left, and all that it began has ended
//   even   it has seen that all are there, has set its counters to the greatest of anybody's, and is
//          a member
//
// It takes the second step when everybody has taken the first, and begins no operation until
// everybody has taken the second: then whatever it reads of the others is of after the return.
// Nobody can be further ahead, so what the greatest is does not change before all have read it.
//
// A rank that dies leaves its `entry` as it was. Who is dead and short of a step keeps everybody from
// the next one, and who is dead and was not keeps nobody: survivors, who look at the word after they
// know of the death, all find the same. Once it is forgotten nobody waits for it, and the rest take
// up where they were. Its counters still count: beyond them it is no member of anything.

#include <algorithm>

#include "driver.hpp"
#include "engine.hpp"

namespace phalanx {

namespace {

constexpr std::uint64_t kNap = 20'000'000;  // nanoseconds; who comes rings, who dies does not
constexpr Pace kAtOnce{0, 0};

}  // namespace

Engine::Entry Engine::rejoin(std::uint64_t calls, std::uint64_t nanoseconds) {
  const Driver::Caller caller(driver_.get());
  const std::uint64_t deadline = now_ns() + nanoseconds;
  Pace pace = pace_;  // at first; who waits for long is not to burn a core
  while (true) {
    std::vector<int> late;
    {
      const std::lock_guard lock(mutex_);
      // Before it is asked whether the group has failed: what all have agreed on holds for all.
      const bool moved = come_back(calls);
      if (moved || failure_.outcome != Outcome::pending) return {failure_, stage(), agreed_calls_};
      late = late_ranks();
    }
    const std::uint64_t step = mine_.entry.read();
    const auto all_came = [&] {
      return std::all_of(late.begin(), late.end(), [&](int rank) {
        return region_.control(rank).entry.read() >= step;
      });
    };
    if (wait_a_while(mine_.hall, pace, std::min(kNap, nanoseconds), all_came)) continue;
    pace = kAtOnce;
    for (const int rank : late)  // its word is read after its death is known, and so is final
      if (has_ended(rank) && region_.control(rank).entry.read() < step)
        return at_stage({Outcome::dead, rank, -1});
    if (now_ns() >= deadline) return at_stage({});
  }
}

Engine::Entry Engine::at_stage(Verdict verdict) {
  const std::lock_guard lock(mutex_);
  return {verdict, stage(), agreed_calls_};
}

std::vector<int> Engine::awaited() {
  const std::lock_guard lock(mutex_);
  return late_ranks();
}

// Whichever step this rank has taken last, it waits for the others to take it too.
std::vector<int> Engine::late_ranks() const {
  const std::uint64_t step = mine_.entry.read();
  std::vector<int> ranks;
  for (int rank = 0; rank < ranks_; ++rank)
    if (!is_forgotten(rank) && region_.control(rank).entry.read() < step) ranks.push_back(rank);
  return ranks;
}

Engine::Stage Engine::stage() const {
  if (!coming_back_) return mine_.left_at.read() == kNever ? Stage::entered : Stage::outside;
  return mine_.entry.read() % 2 != 0 ? Stage::waiting : Stage::entering;
}

bool Engine::come_back(std::uint64_t calls) {
  switch (stage()) {
    case Stage::outside:
      mine_.calls.publish(calls);
      coming_back_ = true;
      publish_entry(mine_.entry.read() + 1);
      return true;
    case Stage::waiting:
      if (!late_ranks().empty()) return false;
      take_place();
      publish_entry(mine_.entry.read() + 1);
      return true;
    case Stage::entering:
      if (!late_ranks().empty()) return false;
      coming_back_ = false;
      return true;
    case Stage::entered:
      break;
  }
  return true;
}

std::uint64_t Engine::greatest(Counter Control::*counter) const {
  std::uint64_t most = 0;
  for (int rank = 0; rank < ranks_; ++rank)
    most = std::max(most, (region_.control(rank).*counter).read());
  return most;
}

// As if this rank had taken part in all that the others did meanwhile, and all of it were done.
void Engine::take_place() {
  issued_ = announced_ = shared_ = finished_ = greatest(&Control::arrived);
  ended_.store(finished_, std::memory_order_release);
  windows_used_ = greatest(&Control::finished);
  agreed_calls_ = greatest(&Control::calls);
  if (driver_) driver_->count_from(issued_);
  mine_.arrived.publish(issued_);
  mine_.done.publish(issued_);
  for (Counter* const counter : {&mine_.filled, &mine_.worked, &mine_.finished})
    counter->publish(windows_used_);
  mine_.left_at.publish(kNever);
}

void Engine::publish_entry(std::uint64_t value) {
  mine_.entry.publish(value);
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) wake(region_.control(rank).hall);
}

}  // namespace phalanx
