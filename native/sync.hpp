// Waiting for another rank: spin briefly, then yield, then sleep on a futex.
//
// A spinning waiter reacts within a fraction of a microsecond. On a busy machine it takes the time
// that its peer needs, so it yields after a while, and sleeps after another. A publisher that has no
// sleeping peers pays one load per peer.
//
// No wake-up is lost: the sleeper increments `waiters`, then reads the counter; the publisher stores
// the counter, then reads `waiters`. All four are sequentially consistent, so at least one side sees
// the other's store. If it is the publisher, it changes `futex_word`, and a futex does not sleep on a
// word that has changed. Any number of threads may sleep in one slot; a wake-up wakes all of them.

#pragma once

#include <cstdint>

#include "region_layout.hpp"

namespace phalanx {

std::uint64_t now_ns();  // monotonic, the same in all processes of a machine

struct SpinPolicy {
  int spins;   // checks before the first yield
  int yields;  // checks with a yield after each
};

inline constexpr SpinPolicy kNoSpin{0, 0};

// Depends on whether there are more ranks than cores.
SpinPolicy spin_policy_for(int ranks, int cores);

// Sleeps until the futex word differs from `seen`, at most for `nanoseconds`.
void futex_wait(WaitSlot& slot, std::uint32_t seen, std::uint64_t nanoseconds);

// Wakes all threads that sleep in the slot.
void wake(WaitSlot& slot);

void yield_core();

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `ready()`, with at most one sleep of `nanoseconds`. Returns whether it is ready.
template <class Ready>
bool spin_then_sleep(WaitSlot& slot, const SpinPolicy& policy, std::uint64_t nanoseconds,
                     Ready&& ready) {
  for (int i = 0; i < policy.spins; ++i) {
    if (ready()) return true;
    cpu_pause();
  }
  for (int i = 0; i < policy.yields; ++i) {
    if (ready()) return true;
    yield_core();
  }
  const std::uint32_t seen = slot.futex_word.load(std::memory_order_seq_cst);
  slot.waiters.fetch_add(1, std::memory_order_seq_cst);
  const bool already = ready();
  if (!already) futex_wait(slot, seen, nanoseconds);
  slot.waiters.fetch_sub(1, std::memory_order_seq_cst);
  return already || ready();
}

}  // namespace phalanx
