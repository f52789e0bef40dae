#include "engine.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "driver.hpp"

namespace phalanx {

namespace {

constexpr std::uint64_t kDeathCheckInterval = 5'000'000;  // nanoseconds

}  // namespace

Engine::Engine(Region region, int rank, int cores)
    : region_(std::move(region)),
      rank_(rank),
      ranks_(region_.layout().ranks),
      cores_(cores),
      spin_policy_(spin_policy_for(ranks_, cores)),
      mine_(region_.control(rank)),
      transfers_(region_, rank) {
  members_.reserve(static_cast<std::size_t>(ranks_));
}

void Engine::mark_present() { mine_.present.publish(region_.token()); }

Engine::~Engine() {
  stop_driver();  // its thread uses `driver_`
}

void Engine::set_cores(int cores) {
  cores_ = cores;
  spin_policy_ = spin_policy_for(ranks_, cores);
}

void Engine::watch(int rank, std::shared_ptr<const Process> process) {
  processes_[rank] = std::move(process);
}

std::uint64_t Engine::issue(Request request) {
  if (driver_) return driver_->submit(std::move(request));
  const std::lock_guard lock(mutex_);
  prepare(spare_, std::move(request));
  enqueue(spare_);
  progress();
  return issued_;
}

Engine::Issued Engine::try_issue(Request request) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || failure_.outcome != Outcome::pending) return {};
  if (driver_) {
    if (!driver_->is_running()) return {};
    lock.unlock();
    return {driver_->submit(std::move(request)), false};
  }
  const bool brief = queue_.empty() && is_small(request) && !transfers_.is_busy();
  prepare(spare_, std::move(request));
  enqueue(spare_);
  if (brief) {
    progress();
  } else {
    while (announce_next()) {
    }
  }
  return {issued_, !brief};
}

void Engine::prepare(Operations& spare, Request&& request) {
  if (spare.empty()) spare.emplace_back();
  Operation& operation = spare.front();
  if (operation.failure.empty()) operation.failure.emplace_back();
  operation.request = std::move(request);
}

void Engine::enqueue(Operations& from) noexcept {
  const auto operation = from.begin();
  queue_.splice(queue_.end(), from, operation);
  operation->sequence = ++issued_;
  if (to_announce_ == queue_.end()) to_announce_ = operation;
  if (to_execute_ == queue_.end()) to_execute_ = operation;
}

// Keeps the operation as a spare one, up to a limit.
void Engine::retire_first() noexcept {
  Operation& first = queue_.front();
  if (first.failure.front().result.outcome != Outcome::pending) {
    first.failure.front().sequence = first.sequence;
    failed_.splice(failed_.end(), first.failure);
    any_failed_.store(true, std::memory_order_relaxed);
  }
  if (spare_.size() >= kRingSize) {
    queue_.pop_front();
    return;
  }
  first.reset();
  spare_.splice(spare_.begin(), queue_, queue_.begin());
}

bool Engine::has_succeeded(std::uint64_t ticket) const {
  return ticket <= visible_finished_.load(std::memory_order_acquire) &&
         !any_failed_.load(std::memory_order_relaxed);
}

// For engines with a driver, which does the work.
Result Engine::peek(std::uint64_t ticket) {
  if (has_succeeded(ticket)) return {Outcome::finished, -1, -1};
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock ? result_of(ticket) : Result{};
}

Result Engine::test(std::uint64_t ticket) {
  if (has_driver()) return peek(ticket);
  const std::lock_guard lock(mutex_);
  progress();
  return result_of(ticket);
}

Result Engine::wait(std::uint64_t ticket, std::uint64_t nanoseconds) {
  if (driver_ && has_succeeded(ticket)) return {Outcome::finished, -1, -1};
  const Driver::CallerScope scope(driver_.get());
  const std::uint64_t interval = std::min(kDeathCheckInterval, nanoseconds);
  std::uint64_t deadline = 0;  // the clock is not read unless the first check fails
  while (true) {
    BlockedOn blocked_on;
    {
      const std::lock_guard lock(mutex_);
      progress();
      const Result now = result_of(ticket);
      if (now.outcome != Outcome::pending) return now;
      blocked_on = blocked_on_;
    }
    const auto moved = [&] {
      return blocked_on.counter == nullptr || blocked_on.counter->read() >= blocked_on.needed ||
             (driver_ && driver_->has_submissions());
    };
    if (spin_then_sleep(mine_.peer_wait, spin_policy_, interval, moved)) continue;
    {
      const std::lock_guard lock(mutex_);
      check_for_deaths();
    }
    const std::uint64_t now = now_ns();
    if (deadline == 0) deadline = now + nanoseconds;
    if (now >= deadline) return test(ticket);
  }
}

std::uint64_t Engine::send(int to, std::int64_t tag, const char* data, std::size_t bytes) {
  const Driver::CallerScope scope(driver_.get());
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = transfers_.send(to, tag, data, bytes);
  transfers_.progress();
  notify_driver();
  return ticket;
}

std::uint64_t Engine::receive(int from, std::int64_t tag, char* data, std::size_t bytes) {
  const Driver::CallerScope scope(driver_.get());
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = transfers_.receive(from, tag, data, bytes);
  transfers_.progress();
  notify_driver();
  return ticket;
}

Transfers::Status Engine::test_transfer(std::uint64_t ticket, bool waits) {
  const Driver::CallerScope scope(driver_.get());
  const std::lock_guard lock(mutex_);
  // After an abort the memory may have been freed.
  if (failure_.outcome == Outcome::aborted) return transfers_.status(ticket);
  if (!has_driver()) progress();
  transfers_.progress();
  return waits ? transfers_.status_for_wait(ticket) : transfers_.status(ticket);
}

Transfers::Status Engine::wait_transfer(std::uint64_t ticket, std::uint64_t nanoseconds) {
  const std::uint64_t deadline = now_ns() + nanoseconds;
  const std::uint64_t interval = std::min(kDeathCheckInterval, nanoseconds);
  while (true) {
    const Transfers::Status status = test_transfer(ticket, true);
    if (status.state != Transfers::State::pending || now_ns() >= deadline) return status;
    const auto aborted = [&] {
      const std::lock_guard lock(mutex_);
      return failure_.outcome == Outcome::aborted;
    };
    const auto news = [&] {
      const std::lock_guard lock(mutex_);
      return transfers_.can_progress() || failure_.outcome == Outcome::aborted ||
             transfers_.status(ticket).state != Transfers::State::pending;
    };
    if (aborted()) return {Transfers::State::stopped, status.peer, status.bytes, false};
    if (!spin_then_sleep(mine_.peer_wait, spin_policy_, interval, news) &&
        status.peer >= 0 && has_exited(status.peer) && !news())
      return status;  // the peer is dead; the caller asks `dead_ranks()`
  }
}

void Engine::detach_transfer(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  transfers_.detach(ticket);
}

bool Engine::cancel_transfer(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  return transfers_.cancel(ticket);
}

std::size_t Engine::transfers_kept() {
  const std::lock_guard lock(mutex_);
  return transfers_.kept();
}

std::vector<int> Engine::dead_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < ranks_; ++rank)
    if (has_exited(rank)) ranks.push_back(rank);
  return ranks;
}

std::vector<int> Engine::members() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < ranks_; ++rank)
    if (!is_excluded(rank) && region_.control(rank).left_at.read() == kNever)
      ranks.push_back(rank);
  return ranks;
}

bool Engine::leave() {
  const std::lock_guard lock(mutex_);
  if (driver_) driver_->accept_submissions();
  progress();
  if (finished_ != issued_) return false;
  publish(&Control::left_at, issued_ + 1);
  return true;
}

void Engine::exclude(int rank) {
  const std::lock_guard lock(mutex_);
  const bool had_aborted = region_.control(rank).abort_epoch.read() % 2 != 0;  // final: it is dead
  if (had_aborted && !is_excluded(rank)) {
    // Published by the next `done`: see `torn_by`.
    mine_.excluded_since[rank].store(executed_ + 1, std::memory_order_release);
    mine_.exclusions.publish(mine_.exclusions.read() + 1);
  }
  excluded_ |= std::uint64_t{1} << rank;
  if (failure_.outcome == Outcome::dead || failure_.outcome == Outcome::aborted) {
    failure_ = {};
    const std::uint64_t abort_epoch = mine_.abort_epoch.read();
    if (abort_epoch % 2 != 0) publish(&Control::abort_epoch, abort_epoch + 1);
  }
  notify_driver();
}

void Engine::abort() {
  const Driver::CallerScope scope(driver_.get());
  const std::lock_guard lock(mutex_);
  failure_.outcome = Outcome::aborted;
  const std::uint64_t abort_epoch = mine_.abort_epoch.read();
  if (abort_epoch % 2 == 0) {
    mine_.abort_epoch.publish(abort_epoch + 1);
    wait_for_accesses();
  }
  for (int rank = 0; rank < ranks_; ++rank) wake(region_.control(rank).peer_wait);
  wake(mine_.rejoin_wait);
}

Result Engine::result_of(std::uint64_t ticket) const {
  if (ticket > finished_) return failure_;
  // From the back: there may be many, and callers ask about recent ones.
  const auto failed = std::find_if(failed_.rbegin(), failed_.rend(),
                                   [&](const auto& failure) { return failure.sequence <= ticket; });
  if (failed != failed_.rend() && failed->sequence == ticket) return failed->result;
  return {Outcome::finished, -1, -1};
}

// The first cause wins.
void Engine::mark_failed(Operation& operation, Outcome outcome, int rank) {
  Result& result = operation.failure.front().result;
  if (result.outcome == Outcome::pending) result = {outcome, rank, -1};
}

// -- driver ---------------------------------------------------------------------------------------

void Engine::start_driver() {
  // Callers and driver threads may all be awake at once.
  driver_ = std::make_unique<Driver>(*this, spin_policy_for(2 * ranks_, cores_));
  try {
    driver_->start();
  } catch (...) {
    driver_.reset();
    throw;
  }
}

void Engine::stop_driver() {
  if (driver_) driver_->stop();
}

bool Engine::has_driver() const { return driver_ && driver_->is_running(); }

void Engine::notify_driver() {
  if (!driver_) return;
  driver_->update_unfinished();
  driver_->notify();
}

// Announces all that is queued, and executes small operations if they are next.
void Engine::progress_briefly() {
  if (failure_.outcome != Outcome::pending) return;
  driver_->accept_submissions();
  while (announce_next()) {
  }
  while (executed_ < announced_ && is_small(to_execute_->request) && execute_next()) {
  }
  while (finish_next()) {
  }
  visible_finished_.store(finished_, std::memory_order_release);
}

// -- progress -------------------------------------------------------------------------------------

void Engine::progress() noexcept {
  if (failure_.outcome != Outcome::pending) return;
  blocked_on_ = {};
  while (step()) {
  }
  if (transfers_.is_busy()) transfers_.progress();
  if (driver_) driver_->update_unfinished();
}

bool Engine::step() noexcept {
  if (failure_.outcome != Outcome::pending) return false;
  if (driver_) driver_->accept_submissions();
  bool moved = announce_next();
  moved |= execute_next();
  moved |= finish_next();
  visible_finished_.store(finished_, std::memory_order_release);
  return moved;
}

// A place in the ring, and its small slot, are free when all members have executed their last user.
bool Engine::announce_next() {
  if (announced_ == issued_) return false;
  const std::uint64_t next = announced_ + 1;
  if (next > kRingSize) {
    refresh_members(next - kRingSize);
    if (!all_reached(&Control::done, next - kRingSize)) return false;
  }
  describe(*to_announce_++);
  announced_ = next;
  publish(&Control::arrived, next);
  return true;
}

bool Engine::execute_next() {
  if (executed_ == announced_) return false;
  const std::uint64_t next = executed_ + 1;
  refresh_members(next);
  if (!all_reached(&Control::arrived, next)) return false;
  Operation& operation = *to_execute_;
  if (!operation.in_windows && !matches_peers(operation)) return false;
  if (const int missing = missing_rank(operation.request); missing >= 0)
    mark_failed(operation, Outcome::root_left, missing);
  else if (!execute(operation))
    return false;
  executed_ = next;
  ++to_execute_;
  publish(&Control::done, next);
  return true;
}

// A direct operation finishes when all members that access buffers are done. Until then they may read
// or store into this rank's buffer, and it is not known whether the operation is torn.
bool Engine::finish_next() {
  if (finished_ == executed_) return false;
  Operation& operation = queue_.front();
  if (operation.direct) {
    refresh_members(operation.sequence);
    if (!all_reached(&Control::done, operation.sequence, idle_root(operation))) return false;
    const int rank = torn_by(operation);
    if (rank >= 0) mark_failed(operation, Outcome::torn, rank);
  }
  ++finished_;
  retire_first();
  return true;
}

bool Engine::is_small(const Request& request) const {
  return std::max(request.bytes, request.output_bytes) <= region_.layout().sizes.small;
}

void Engine::describe(Operation& operation) {
  const Request& request = operation.request;
  Descriptor& mine = mine_.ring[operation.sequence % kRingSize];
  mine.bytes = request.bytes;
  mine.fingerprint = request.fingerprint;
  mine.offset = region_.offset_of(request.input, request.bytes);
  mine.factor = request.reduction.factor;
  mine.slot_bytes = request.tree != nullptr ? request.tree->slot_bytes : 0;
  mine.root = request.root;
  mine.kind = request.kind;
  mine.type = request.reduction.type;
  mine.op = request.reduction.op;
  if (request.kind == Collective::alltoall)
    std::copy(request.send_at.begin(), request.send_at.end(),
              mine_.splits[operation.sequence % kRingSize]);
  const Layout& layout = region_.layout();
  if (request.bytes != 0 && request.bytes <= layout.sizes.small && is_source(request, rank_))
    std::memcpy(region_.bytes(layout.small_slot(rank_, operation.sequence)), request.input,
                request.bytes);
}

bool Engine::matches_peers(const Operation& operation) {
  const Descriptor& mine = descriptor(rank_, operation.sequence);
  for (const int rank : members_) {
    const Descriptor& theirs = descriptor(rank, operation.sequence);
    const bool same = theirs.kind == mine.kind && theirs.type == mine.type &&
                      theirs.op == mine.op && theirs.root == mine.root &&
                      theirs.fingerprint == mine.fingerprint && theirs.factor == mine.factor;
    if (!same || !sizes_match(operation, rank)) {
      failure_ = {Outcome::mismatch, std::min(rank_, rank), std::max(rank_, rank)};
      return false;
    }
  }
  return true;
}

// In an all-to-all, whether a rank sends as much as this rank has room for. In an ordered all-reduce,
// whether its slots are as many and as long as this rank's, which accesses what its own tree says.
bool Engine::sizes_match(const Operation& operation, int rank) const {
  if (operation.request.kind == Collective::ordered_allreduce) {
    const Descriptor& theirs = descriptor(rank, operation.sequence);
    return theirs.bytes == operation.request.bytes &&
           theirs.slot_bytes == operation.request.tree->slot_bytes;
  }
  if (operation.request.kind != Collective::alltoall) return true;
  const std::uint64_t* sent = region_.control(rank).splits[operation.sequence % kRingSize];
  const auto me = static_cast<std::size_t>(rank_);
  const auto them = static_cast<std::size_t>(rank);
  const std::vector<std::uint64_t>& room = operation.request.receive_at;
  return sent[me + 1] - sent[me] == room[them + 1] - room[them];
}

}  // namespace phalanx
