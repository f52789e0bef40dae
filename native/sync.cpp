#include "sync.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace phalanx {

namespace {

// Not FUTEX_PRIVATE: processes share the word.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  static_assert(sizeof(word) == sizeof(std::uint32_t));
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout,
                   nullptr, 0);
}

}  // namespace

std::uint64_t now_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(time.tv_nsec);
}

SpinPolicy spin_policy_for(int ranks, int cores) {
  // With a core per rank, a peer answers within microseconds, and spinning pays. With fewer, the peer
  // may be waiting for this core. A rank with its own core yields only twice: if other programs take
  // the core, each keeps it for a whole time slice, while a sleeper is woken at once. (On busy cores
  // an all-reduce of 25 MiB took 40 ms with 50 yields and 9 ms with 2.)
  return ranks <= cores ? SpinPolicy{2000, 2} : SpinPolicy{20, 200};
}

void yield_core() { ::sched_yield(); }

void futex_wait(WaitSlot& slot, std::uint32_t seen, std::uint64_t nanoseconds) {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000u);
  timeout.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000u);
  futex(slot.futex_word, FUTEX_WAIT, seen, &timeout);  // the caller checks again
}

void wake(WaitSlot& slot) {
  if (slot.waiters.load(std::memory_order_seq_cst) == 0) return;
  slot.futex_word.fetch_add(1, std::memory_order_seq_cst);
  futex(slot.futex_word, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace phalanx
