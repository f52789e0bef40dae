// Rejoin: ranks that have left become members again, all together, with counters that all agree on.
//
// Every living rank has left, so no operation is in progress and no rank reads who is a member. Each
// rank counts two steps in its `rejoin_step`:
//
//   odd    it has left, and all its operations have ended
//   even   it has seen that all ranks are at the first step, has set its counters to the maximum over
//          all ranks, and is a member
//
// A rank takes the second step when all have taken the first, and issues no operation until all have
// taken the second: then everything it reads of its peers was written after the rejoin. No rank can be
// further ahead, so the maximum does not change before all have read it.
//
// A dead rank's `rejoin_step` is final. If it had not taken a step, it keeps the others from the next
// one, and they report its death; otherwise it holds up nobody. Survivors read the step after they know
// of the death, so all find the same. Once the dead rank is excluded the others continue where they
// were. Its counters still count in the maximum: beyond them it is a member of nothing.

#include <algorithm>

#include "driver.hpp"
#include "engine.hpp"

namespace phalanx {

namespace {

constexpr std::uint64_t kDeathCheckInterval = 20'000'000;  // nanoseconds

}  // namespace

Engine::RejoinStatus Engine::rejoin(std::uint64_t calls, std::uint64_t nanoseconds) {
  const Driver::CallerScope scope(driver_.get());
  const std::uint64_t deadline = now_ns() + nanoseconds;
  const std::uint64_t interval = std::min(kDeathCheckInterval, nanoseconds);
  SpinPolicy policy = spin_policy_;  // a long wait does not spin
  while (true) {
    std::vector<int> late;
    {
      const std::lock_guard lock(mutex_);
      // Before the check for a failure: a step that all have agreed on is valid on all.
      const bool moved = advance_rejoin(calls);
      if (moved || failure_.outcome != Outcome::pending) return {failure_, stage(), agreed_calls_};
      late = late_ranks();
    }
    const std::uint64_t step = mine_.rejoin_step.read();
    const auto all_came = [&] {
      return std::all_of(late.begin(), late.end(), [&](int rank) {
        return region_.control(rank).rejoin_step.read() >= step;
      });
    };
    if (spin_then_sleep(mine_.rejoin_wait, policy, interval, all_came)) continue;
    policy = kNoSpin;
    for (const int rank : late)  // the step is read after the death is known, so it is final
      if (has_exited(rank) && region_.control(rank).rejoin_step.read() < step)
        return rejoin_status({Outcome::dead, rank, -1});
    if (now_ns() >= deadline) return rejoin_status({});
  }
}

Engine::RejoinStatus Engine::rejoin_status(Result result) {
  const std::lock_guard lock(mutex_);
  return {result, stage(), agreed_calls_};
}

std::vector<int> Engine::missing_in_rejoin() {
  const std::lock_guard lock(mutex_);
  return late_ranks();
}

// After either step, a rank waits for the others to take it too.
std::vector<int> Engine::late_ranks() const {
  const std::uint64_t step = mine_.rejoin_step.read();
  std::vector<int> ranks;
  for (int rank = 0; rank < ranks_; ++rank)
    if (!is_excluded(rank) && region_.control(rank).rejoin_step.read() < step) ranks.push_back(rank);
  return ranks;
}

Engine::RejoinStage Engine::stage() const {
  if (!rejoining_) return mine_.left_at.read() == kNever ? RejoinStage::entered : RejoinStage::outside;
  return mine_.rejoin_step.read() % 2 != 0 ? RejoinStage::waiting : RejoinStage::entering;
}

bool Engine::advance_rejoin(std::uint64_t calls) {
  switch (stage()) {
    case RejoinStage::outside:
      mine_.calls.publish(calls);
      rejoining_ = true;
      publish_rejoin_step(mine_.rejoin_step.read() + 1);
      return true;
    case RejoinStage::waiting:
      if (!late_ranks().empty()) return false;
      adopt_counters();
      publish_rejoin_step(mine_.rejoin_step.read() + 1);
      return true;
    case RejoinStage::entering:
      if (!late_ranks().empty()) return false;
      rejoining_ = false;
      return true;
    case RejoinStage::entered:
      break;
  }
  return true;
}

std::uint64_t Engine::max_over_ranks(Counter Control::*counter) const {
  std::uint64_t most = 0;
  for (int rank = 0; rank < ranks_; ++rank)
    most = std::max(most, (region_.control(rank).*counter).read());
  return most;
}

// As if this rank had completed all operations of the others.
void Engine::adopt_counters() {
  issued_ = announced_ = executed_ = finished_ = max_over_ranks(&Control::arrived);
  visible_finished_.store(finished_, std::memory_order_release);
  windows_used_ = max_over_ranks(&Control::released);
  agreed_calls_ = max_over_ranks(&Control::calls);
  if (driver_) driver_->reset_tickets(issued_);
  mine_.arrived.publish(issued_);
  mine_.done.publish(issued_);
  for (Counter* const counter : {&mine_.filled, &mine_.processed, &mine_.released})
    counter->publish(windows_used_);
  mine_.left_at.publish(kNever);
}

void Engine::publish_rejoin_step(std::uint64_t value) {
  mine_.rejoin_step.publish(value);
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) wake(region_.control(rank).rejoin_wait);
}

}  // namespace phalanx
