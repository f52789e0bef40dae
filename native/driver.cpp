#include "driver.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <utility>

namespace phalanx {

namespace {

constexpr std::uint64_t kDeathCheckInterval = 20'000'000;  // nanoseconds; no caller is waiting
constexpr std::uint64_t kForever = 3600'000'000'000;       // until a wake-up

// Blocks all signals for threads started meanwhile, but for synchronous ones.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, own);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Driver::Driver(Engine& engine, const SpinPolicy& policy)
    : engine_(engine), spin_policy_(policy), owner_pid_(::getpid()), tickets_(engine.issued_) {}

Driver::~Driver() {
  stop();
  if (::getpid() != owner_pid_) static_cast<void>(thread_.release());  // joining would hang
}

void Driver::start() {
  const BlockedSignals inherited;
  running_.store(true, std::memory_order_seq_cst);  // submissions wait for it
  try {
    thread_ = std::make_unique<std::thread>([this] { run(); });
  } catch (...) {
    running_.store(false, std::memory_order_seq_cst);
    throw;
  }
}

void Driver::stop() {
  if (::getpid() != owner_pid_ || thread_ == nullptr) return;
  if (stop_.exchange(true, std::memory_order_seq_cst)) return;
  notify();
  thread_->join();
}

std::uint64_t Driver::submit(Request request) {
  std::uint64_t ticket = 0;
  {
    const std::lock_guard lock(inbox_mutex_);
    Engine::prepare(spare_, std::move(request));
    inbox_.splice(inbox_.end(), spare_, spare_.begin());
    ticket = ++tickets_;
    submitted_.store(inbox_.size(), std::memory_order_seq_cst);
    unfinished_.store(true, std::memory_order_seq_cst);
  }
  if (!is_running()) {
    const std::lock_guard lock(engine_.mutex_);
    engine_.progress();
    return ticket;
  }
  // Announce it now if the lock is free; large operations are left to the thread.
  bool next_in_line = true;  // unknown while another thread has the lock
  if (std::unique_lock lock(engine_.mutex_, std::try_to_lock); lock) {
    engine_.progress_briefly();
    next_in_line = engine_.queue_.size() == 1;
    if (engine_.queue_.empty()) update_unfinished();
  }
  if (next_in_line) notify();  // otherwise the thread is busy with earlier operations
  return ticket;
}

void Driver::notify() {
  notifications_.fetch_add(1, std::memory_order_seq_cst);
  wake(driver_wait_);
  wake(engine_.mine_.peer_wait);
}

void Driver::accept_submissions() noexcept {
  if (!has_submissions()) return;
  const std::lock_guard lock(inbox_mutex_);
  while (!inbox_.empty()) engine_.enqueue(inbox_);
  spare_.splice(spare_.end(), engine_.spare_);  // spares are taken from here
  submitted_.store(0, std::memory_order_seq_cst);
}

void Driver::update_unfinished() noexcept {
  const std::lock_guard lock(inbox_mutex_);
  const bool left = !engine_.queue_.empty() || !inbox_.empty() || engine_.transfers_.is_busy();
  unfinished_.store(left && engine_.failure_.outcome == Outcome::pending,
                    std::memory_order_seq_cst);
}

void Driver::reset_tickets(std::uint64_t last) {
  const std::lock_guard lock(inbox_mutex_);
  tickets_ = last;
}

Driver::CallerScope::CallerScope(Driver* driver) : driver_(driver) {
  if (driver_ != nullptr) driver_->callers_.fetch_add(1, std::memory_order_seq_cst);
}

Driver::CallerScope::~CallerScope() {
  if (driver_ == nullptr) return;
  driver_->callers_.fetch_sub(1, std::memory_order_seq_cst);
  if (driver_->unfinished_.load(std::memory_order_seq_cst)) wake(driver_->driver_wait_);
}

// -- the thread -----------------------------------------------------------------------------------

void Driver::run() {
  ::pthread_setname_np(::pthread_self(), "phalanx-driver");
  while (true) {
    while (!should_run())
      spin_then_sleep(driver_wait_, kNoSpin, kForever, [this] { return should_run(); });
    if (must_stop()) break;
    const Progress last = make_progress();
    wake(engine_.mine_.peer_wait);  // a caller may wait there for what has just finished
    if (last.blocked) wait_for_peers(last);
  }
  running_.store(false, std::memory_order_seq_cst);
}

bool Driver::should_run() const {
  return must_stop() || (unfinished_.load(std::memory_order_seq_cst) && !has_callers());
}

// Makes progress until it is blocked or a caller arrives.
Driver::Progress Driver::make_progress() {
  Progress now;
  now.notifications = notifications_.load(std::memory_order_seq_cst);  // before the state they announce
  const std::lock_guard lock(engine_.mutex_);
  engine_.blocked_on_ = {};
  bool moved = true;
  while (moved && !has_callers() && !must_stop()) moved = engine_.step();
  now.transferring = engine_.transfers_.is_busy();
  if (now.transferring && engine_.failure_.outcome == Outcome::pending)
    engine_.transfers_.progress();
  update_unfinished();
  now.blocked = !moved && unfinished_.load(std::memory_order_seq_cst);
  now.blocked_on = engine_.blocked_on_;
  return now;
}

void Driver::wait_for_peers(const Progress& last) {
  const auto ready = [&] { return can_progress(last); };
  if (spin_then_sleep(engine_.mine_.peer_wait, spin_policy_, kDeathCheckInterval, ready)) return;
  const std::lock_guard lock(engine_.mutex_);
  engine_.check_for_deaths();
}

bool Driver::can_progress(const Progress& last) {
  if (has_callers() || notifications_.load(std::memory_order_seq_cst) != last.notifications)
    return true;
  const Counter* const counter = last.blocked_on.counter;
  if (counter != nullptr && counter->read() >= last.blocked_on.needed) return true;
  if (!last.transferring) return counter == nullptr;
  const std::lock_guard lock(engine_.mutex_);
  return engine_.transfers_.can_progress();
}

}  // namespace phalanx
