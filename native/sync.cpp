#include "sync.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace phalanx {

namespace {

// Not FUTEX_PRIVATE: the word is shared by processes.
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

Pace pace_for(int ranks, int cores) {
  // With a core for each rank a peer is a few microseconds away, and it pays to stay awake for it.
  // Without, it may be waiting for this very core. A core is offered only twice before sleeping where
  // ranks have cores of their own: if it does not go to the peer, there are strangers, who keep it
  // for a whole slice each time, while a sleeper is back when it is called. (Linux counts a slice as
  // used up by who yields in it: 50 offers made 25 MiB take 40 ms on busy cores, 2 of them 9.)
  return ranks <= cores ? Pace{2000, 2} : Pace{20, 200};
}

void yield_core() { ::sched_yield(); }

void sleep_on(Bed& bed, std::uint32_t seen, std::uint64_t nanoseconds) {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000u);
  timeout.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000u);
  futex(bed.bell, FUTEX_WAIT, seen, &timeout);  // whatever ended it, the caller looks again
}

void wake(Bed& bed) {
  if (bed.sleeping.load(std::memory_order_seq_cst) == 0) return;
  bed.bell.fetch_add(1, std::memory_order_seq_cst);
  futex(bed.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace phalanx
