#include "driver.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace phalanx {

namespace {

constexpr std::uint64_t kNap = 20'000'000;            // nanoseconds; nobody is waiting meanwhile
constexpr std::uint64_t kLong = 3600'000'000'000;     // until somebody rings
constexpr Pace kAtOnce{0, 0};

// Signals are for the program's own threads, but for those that a thread brings upon itself.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, own);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Driver::Driver(Engine& engine, const Pace& pace)
    : engine_(engine), pace_(pace), maker_(::getpid()), tickets_(engine.issued_) {}

Driver::~Driver() {
  stop();
  if (::getpid() != maker_) static_cast<void>(thread_.release());  // to join it would be to hang
}

void Driver::start() {
  const NoSignals inherited;
  running_.store(true, std::memory_order_seq_cst);  // it will; what is handed in waits for it
  try {
    thread_ = std::make_unique<std::thread>([this] { run(); });
  } catch (...) {
    running_.store(false, std::memory_order_seq_cst);
    throw;
  }
}

void Driver::stop() {
  if (::getpid() != maker_ || thread_ == nullptr) return;
  if (stop_.exchange(true, std::memory_order_seq_cst)) return;
  nudge();
  thread_->join();
}

// -- what callers do ------------------------------------------------------------------------------

std::uint64_t Driver::hand_in(Request request) {
  std::uint64_t ticket = 0;
  {
    const std::lock_guard lock(inbox_mutex_);
    Engine::prepare(spare_, std::move(request));
    inbox_.splice(inbox_.end(), spare_, spare_.begin());
    ticket = ++tickets_;
    mail_.store(inbox_.size(), std::memory_order_seq_cst);
    unfinished_.store(true, std::memory_order_seq_cst);
  }
  if (!runs()) {
    const std::lock_guard lock(engine_.mutex_);
    engine_.progress();
    return ticket;
  }
  // Peers learn of it at once if nobody is at work here; large shares are left to the thread.
  bool next_in_line = true;  // for all that is known, if somebody is
  if (std::unique_lock lock(engine_.mutex_, std::try_to_lock); lock) {
    engine_.be_brief();
    next_in_line = engine_.queue_.size() == 1;
    if (engine_.queue_.empty()) note();
  }
  if (next_in_line) nudge();  // otherwise it has what comes before to do
  return ticket;
}

void Driver::nudge() {
  nudges_.fetch_add(1, std::memory_order_seq_cst);
  wake(cot_);
  wake(engine_.mine_.bed);
}

void Driver::take_in() noexcept {
  if (!has_mail()) return;
  const std::lock_guard lock(inbox_mutex_);
  while (!inbox_.empty()) engine_.enqueue(inbox_);
  spare_.splice(spare_.end(), engine_.spare_);  // which are used here now
  mail_.store(0, std::memory_order_seq_cst);
}

void Driver::note() noexcept {
  const std::lock_guard lock(inbox_mutex_);
  const bool left = !engine_.queue_.empty() || !inbox_.empty() || engine_.transfers_.is_busy();
  unfinished_.store(left && engine_.failure_.outcome == Outcome::pending,
                    std::memory_order_seq_cst);
}

void Driver::count_from(std::uint64_t ticket) {
  const std::lock_guard lock(inbox_mutex_);
  tickets_ = ticket;
}

Driver::Caller::Caller(Driver* driver) : driver_(driver) {
  if (driver_ != nullptr) driver_->callers_.fetch_add(1, std::memory_order_seq_cst);
}

Driver::Caller::~Caller() {
  if (driver_ == nullptr) return;
  driver_->callers_.fetch_sub(1, std::memory_order_seq_cst);
  if (driver_->unfinished_.load(std::memory_order_seq_cst)) wake(driver_->cot_);
}

// -- the engine, with a driver --------------------------------------------------------------------

void Engine::start_driver() {
  // Callers and threads may all be awake at once.
  driver_ = std::make_unique<Driver>(*this, pace_for(2 * ranks_, cores_));
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

bool Engine::has_driver() const { return driver_ && driver_->runs(); }

bool Engine::ended_well(std::uint64_t ticket) const {
  return ticket <= ended_.load(std::memory_order_acquire) &&
         !spoilt_.load(std::memory_order_relaxed);
}

// With a thread to do the work, to look is only that; it does not even wait for a share under way.
Verdict Engine::look(std::uint64_t ticket) {
  if (ended_well(ticket)) return {Outcome::finished, -1, -1};
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock ? verdict(ticket) : Verdict{};
}

// What keeps a caller for moments only: lets the peers know of all that is queued, and does small
// shares if they are next.
void Engine::be_brief() {
  if (failure_.outcome != Outcome::pending) return;
  driver_->take_in();
  while (announce_next()) {
  }
  while (shared_ < announced_ && is_small(to_share_->request) && share_next()) {
  }
  while (finish_next()) {
  }
  ended_.store(finished_, std::memory_order_release);
}

bool Engine::is_small(const Request& request) const {
  return std::max(request.bytes, request.output_bytes) <= region_.layout().sizes.small;
}

// Has the driver look at what a caller has changed.
void Engine::nudge() {
  if (!driver_) return;
  driver_->note();
  driver_->nudge();
}

// -- what the thread does -------------------------------------------------------------------------

void Driver::run() {
  ::pthread_setname_np(::pthread_self(), "phalanx-driver");
  drive();
  running_.store(false, std::memory_order_seq_cst);
}

void Driver::drive() {
  while (true) {
    while (!is_wanted()) wait_a_while(cot_, kAtOnce, kLong, [this] { return is_wanted(); });
    if (must_stop()) return;
    const View view = turn();
    wake(engine_.mine_.bed);  // a caller may sleep there until what was done is done
    if (view.blocked) sleep_in_bed(view);
  }
}

bool Driver::is_wanted() const {
  return must_stop() || (unfinished_.load(std::memory_order_seq_cst) && !is_called());
}

// Does what can be done now, unless a caller comes who would rather do it.
Driver::View Driver::turn() {
  View view;
  view.nudges = nudges_.load(std::memory_order_seq_cst);  // before all that may be the reason
  const std::lock_guard lock(engine_.mutex_);
  engine_.watch_ = {};
  bool moved = true;
  while (moved && !is_called() && !must_stop()) moved = engine_.step();
  view.transferring = engine_.transfers_.is_busy();
  if (view.transferring && engine_.failure_.outcome == Outcome::pending)
    engine_.transfers_.progress();
  note();
  view.blocked = !moved && unfinished_.load(std::memory_order_seq_cst);
  view.watch = engine_.watch_;
  return view;
}

void Driver::sleep_in_bed(const View& view) {
  if (wait_a_while(engine_.mine_.bed, pace_, kNap, [&] { return has_news(view); })) return;
  const std::lock_guard lock(engine_.mutex_);
  engine_.look_for_dead();
}

bool Driver::has_news(const View& view) {
  if (is_called() || nudges_.load(std::memory_order_seq_cst) != view.nudges) return true;
  const Counter* const counter = view.watch.counter;
  if (counter != nullptr && counter->read() >= view.watch.needed) return true;
  if (!view.transferring) return counter == nullptr;
  const std::lock_guard lock(engine_.mutex_);
  return engine_.transfers_.has_news();
}

}  // namespace phalanx
