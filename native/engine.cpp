#include "engine.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "driver.hpp"

namespace phalanx {

namespace {

constexpr std::uint64_t kNap = 5'000'000;  // nanoseconds asleep between two looks at the peers' lives

bool has_root(Kind kind) {
  return kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::gather ||
         kind == Kind::scatter;
}

}  // namespace

Engine::Engine(Region region, int rank, int cores)
    : region_(std::move(region)),
      rank_(rank),
      ranks_(region_.layout().ranks),
      cores_(cores),
      pace_(pace_for(ranks_, cores)),
      mine_(region_.control(rank)),
      transfers_(region_, rank) {
  members_.reserve(static_cast<std::size_t>(ranks_));
}

void Engine::mark_present() { mine_.present.publish(region_.token()); }

Engine::~Engine() {
  stop_driver();  // before `driver_` goes, which the thread looks at
}

void Engine::share_cores(int cores) {
  cores_ = cores;
  pace_ = pace_for(ranks_, cores);
}

void Engine::watch(int rank, std::shared_ptr<const Process> process) {
  processes_[rank] = std::move(process);
}

std::uint64_t Engine::issue(Request request) {
  if (driver_) return driver_->hand_in(std::move(request));
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
    if (!driver_->runs()) return {};
    lock.unlock();
    return {driver_->hand_in(std::move(request)), false};
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
  if (operation.ending.empty()) operation.ending.emplace_back();
  operation.request = std::move(request);
}

void Engine::enqueue(Operations& from) noexcept {
  const auto operation = from.begin();
  queue_.splice(queue_.end(), from, operation);
  operation->sequence = ++issued_;
  if (to_announce_ == queue_.end()) to_announce_ = operation;
  if (to_share_ == queue_.end()) to_share_ = operation;
}

// Its place is kept for another one, unless there are many.
void Engine::retire_first() noexcept {
  Operation& first = queue_.front();
  if (first.ending.front().verdict.outcome != Outcome::pending) {
    first.ending.front().sequence = first.sequence;
    spoiled_.splice(spoiled_.end(), first.ending);
    spoilt_.store(true, std::memory_order_relaxed);
  }
  if (spare_.size() >= kRing) {
    queue_.pop_front();
    return;
  }
  first.begin_anew();
  spare_.splice(spare_.begin(), queue_, queue_.begin());
}

Verdict Engine::test(std::uint64_t ticket) {
  if (has_driver()) return look(ticket);
  const std::lock_guard lock(mutex_);
  progress();
  return verdict(ticket);
}

Verdict Engine::wait(std::uint64_t ticket, std::uint64_t nanoseconds) {
  if (driver_ && ended_well(ticket)) return {Outcome::finished, -1, -1};
  const Driver::Caller caller(driver_.get());
  std::uint64_t deadline = 0;  // the clock is read only when the first look was in vain
  while (true) {
    Watch watch;
    {
      const std::lock_guard lock(mutex_);
      progress();
      const Verdict now = verdict(ticket);
      if (now.outcome != Outcome::pending) return now;
      watch = watch_;
    }
    const auto moved = [&] {
      return watch.counter == nullptr || watch.counter->read() >= watch.needed ||
             (driver_ && driver_->has_mail());
    };
    if (wait_a_while(mine_.bed, pace_, std::min(kNap, nanoseconds), moved)) continue;
    {
      const std::lock_guard lock(mutex_);
      look_for_dead();
    }
    const std::uint64_t now = now_ns();
    if (deadline == 0) deadline = now + nanoseconds;
    if (now >= deadline) return test(ticket);
  }
}

std::uint64_t Engine::send(int to, std::int64_t tag, const char* data, std::size_t bytes) {
  const Driver::Caller caller(driver_.get());
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = transfers_.send(to, tag, data, bytes);
  transfers_.progress();
  nudge();
  return ticket;
}

std::uint64_t Engine::receive(int from, std::int64_t tag, char* data, std::size_t bytes) {
  const Driver::Caller caller(driver_.get());
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = transfers_.receive(from, tag, data, bytes);
  transfers_.progress();
  nudge();
  return ticket;
}

Transfers::Status Engine::test_transfer(std::uint64_t ticket, bool waits) {
  const Driver::Caller caller(driver_.get());
  const std::lock_guard lock(mutex_);
  if (failure_.outcome == Outcome::aborted) return transfers_.status(ticket);  // memory may be gone
  if (!has_driver()) progress();
  transfers_.progress();
  return waits ? transfers_.status_of_wait(ticket) : transfers_.status(ticket);
}

Transfers::Status Engine::wait_transfer(std::uint64_t ticket, std::uint64_t nanoseconds) {
  const std::uint64_t deadline = now_ns() + nanoseconds;
  while (true) {
    const Transfers::Status status = test_transfer(ticket, true);
    if (status.state != Transfers::State::pending || now_ns() >= deadline) return status;
    const auto aborted = [&] {
      const std::lock_guard lock(mutex_);
      return failure_.outcome == Outcome::aborted;
    };
    const auto news = [&] {
      const std::lock_guard lock(mutex_);
      return transfers_.has_news() || failure_.outcome == Outcome::aborted ||
             transfers_.status(ticket).state != Transfers::State::pending;
    };
    if (aborted()) return {Transfers::State::stopped, status.peer, status.bytes, false};
    if (!wait_a_while(mine_.bed, pace_, std::min(kNap, nanoseconds), news) &&
        status.peer >= 0 && has_ended(status.peer) && !news())
      return status;  // nothing more will come; the caller asks `dead`
  }
}

void Engine::forget_transfer(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  transfers_.forget(ticket);
}

bool Engine::cancel_transfer(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  return transfers_.cancel(ticket);
}

std::size_t Engine::transfers_kept() {
  const std::lock_guard lock(mutex_);
  return transfers_.kept();
}

std::vector<int> Engine::dead() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < ranks_; ++rank)
    if (has_ended(rank)) ranks.push_back(rank);
  return ranks;
}

std::vector<int> Engine::members() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < ranks_; ++rank)
    if (!is_forgotten(rank) && region_.control(rank).left_at.read() == kNever)
      ranks.push_back(rank);
  return ranks;
}

bool Engine::leave() {
  const std::lock_guard lock(mutex_);
  if (driver_) driver_->take_in();
  progress();
  if (finished_ != issued_) return false;
  publish(&Control::left_at, issued_ + 1);
  return true;
}

void Engine::forget(int rank) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t gave_up = region_.control(rank).broken.read() % 2;  // final: the rank is dead
  if (gave_up != 0 && !is_forgotten(rank)) {
    // Published with the next `done`, and before it: see `torn_by`.
    mine_.without[rank].store(shared_ + 1, std::memory_order_release);
    mine_.bereaved.publish(mine_.bereaved.read() + 1);
  }
  forgotten_ |= std::uint64_t{1} << rank;
  if (failure_.outcome == Outcome::dead || failure_.outcome == Outcome::aborted) {
    failure_ = {};
    const std::uint64_t broken = mine_.broken.read();
    if (broken % 2 != 0) publish(&Control::broken, broken + 1);
  }
  nudge();
}

void Engine::abort() {
  const Driver::Caller caller(driver_.get());
  const std::lock_guard lock(mutex_);
  failure_.outcome = Outcome::aborted;
  const std::uint64_t broken = mine_.broken.read();
  if (broken % 2 == 0) {
    mine_.broken.publish(broken + 1);
    wait_until_untouched();
  }
  for (int rank = 0; rank < ranks_; ++rank) wake(region_.control(rank).bed);
  wake(mine_.hall);
}

Verdict Engine::verdict(std::uint64_t ticket) const {
  if (ticket > finished_) return failure_;
  // From the last: who asks, asks about one of the latest, and there may be many.
  const auto spoiled = std::find_if(spoiled_.rbegin(), spoiled_.rend(), [&](const Ending& ending) {
    return ending.sequence <= ticket;
  });
  if (spoiled != spoiled_.rend() && spoiled->sequence == ticket) return spoiled->verdict;
  return {Outcome::finished, -1, -1};
}

// The first reason is the one that is told.
void Engine::spoil(Operation& operation, Outcome outcome, int rank) {
  Verdict& verdict = operation.ending.front().verdict;
  if (verdict.outcome == Outcome::pending) verdict = {outcome, rank, -1};
}

// -- progress -------------------------------------------------------------------------------------

void Engine::progress() noexcept {
  if (failure_.outcome != Outcome::pending) return;
  watch_ = {};
  while (step()) {
  }
  if (transfers_.is_busy()) transfers_.progress();
  if (driver_) driver_->note();
}

bool Engine::step() noexcept {
  if (failure_.outcome != Outcome::pending) return false;
  if (driver_) driver_->take_in();
  bool moved = announce_next();
  moved |= share_next();
  moved |= finish_next();
  ended_.store(finished_, std::memory_order_release);
  return moved;
}

// A place in the ring, with its slot, is free again when everybody is done with what was there.
bool Engine::announce_next() {
  if (announced_ == issued_) return false;
  const std::uint64_t next = announced_ + 1;
  if (next > kRing) {
    refresh_members(next - kRing);
    if (!everybody(&Control::done, next - kRing)) return false;
  }
  describe(*to_announce_++);
  announced_ = next;
  publish(&Control::arrived, next);
  return true;
}

bool Engine::share_next() {
  if (shared_ == announced_) return false;
  const std::uint64_t next = shared_ + 1;
  refresh_members(next);
  if (!everybody(&Control::arrived, next)) return false;
  Operation& operation = *to_share_;
  if (!operation.in_windows && !agreed(operation)) return false;
  if (has_root(operation.request.kind) && !is_member(operation.request.root))
    spoil(operation, Outcome::rootless, operation.request.root);
  else if (!share(operation))
    return false;
  shared_ = next;
  ++to_share_;
  publish(&Control::done, next);
  return true;
}

// Where ranks are at each other's buffers, all wait for all who are: others may still be reading what lies
// in this rank's, or storing into it, and whether the operation is torn is known only when they are done.
bool Engine::finish_next() {
  if (finished_ == shared_) return false;
  Operation& operation = queue_.front();
  if (operation.direct) {
    refresh_members(operation.sequence);
    if (!everybody(&Control::done, operation.sequence, idle_root(operation))) return false;
    const int rank = torn_by(operation);
    if (rank >= 0) spoil(operation, Outcome::torn, rank);
  }
  ++finished_;
  retire_first();
  return true;
}

void Engine::describe(Operation& operation) {
  const Request& request = operation.request;
  Descriptor& mine = mine_.ring[operation.sequence % kRing];
  mine.bytes = request.bytes;
  mine.extent = request.extent;
  mine.offset = region_.offset_of(request.input, request.bytes);
  mine.factor = request.reduction.factor;
  mine.root = request.root;
  mine.kind = request.kind;
  mine.type = request.reduction.type;
  mine.op = request.reduction.op;
  if (request.kind == Kind::alltoall)
    std::copy(request.send_at.begin(), request.send_at.end(),
              mine_.splits[operation.sequence % kRing]);
  const Layout& layout = region_.layout();
  if (request.bytes != 0 && request.bytes <= layout.sizes.small && is_source(request, rank_))
    std::memcpy(region_.bytes(layout.small_slot(rank_, operation.sequence)), request.input,
                request.bytes);
}

bool Engine::agreed(const Operation& operation) {
  const Descriptor& mine = descriptor(rank_, operation.sequence);
  for (const int rank : members_) {
    const Descriptor& theirs = descriptor(rank, operation.sequence);
    const bool same = theirs.kind == mine.kind && theirs.type == mine.type &&
                      theirs.op == mine.op && theirs.root == mine.root &&
                      theirs.extent == mine.extent && theirs.factor == mine.factor;
    if (!same || !expects(operation, rank)) {
      failure_ = {Outcome::mismatch, std::min(rank_, rank), std::max(rank_, rank)};
      return false;
    }
  }
  return true;
}

// In an all-to-all, tells whether a rank sends this one as much as it has room for.
bool Engine::expects(const Operation& operation, int rank) const {
  if (operation.request.kind != Kind::alltoall) return true;
  const std::uint64_t* sent = region_.control(rank).splits[operation.sequence % kRing];
  const auto me = static_cast<std::size_t>(rank_);
  const auto them = static_cast<std::size_t>(rank);
  const std::vector<std::uint64_t>& room = operation.request.receive_at;
  return sent[me + 1] - sent[me] == room[them + 1] - room[them];
}

}  // namespace phalanx
