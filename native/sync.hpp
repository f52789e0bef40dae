// Waiting for another rank: spin briefly, then yield, then sleep.
//
// A waiter that spins answers within a fraction of a microsecond, but on a machine that is busy
// elsewhere it burns the very time that its peer needs; so it gives up its core after a while, and
// sleeps on a futex after another. Nobody rings for a rank that is awake: a publisher pays for one
// look at its peers' `sleeping`.
//
// Why no wake-up is lost: the sleeper stores `sleeping`, then reads the counter; the publisher
// stores the counter, then reads `sleeping`. All four are sequentially consistent, so at least one
// of them sees the other's store. If the publisher does, it moves the bell, and a futex does not
// fall asleep on a bell that has moved.

#pragma once

#include <cstdint>

#include "layout.hpp"

namespace phalanx {

std::uint64_t now_ns();  // of the monotonic clock, which all processes of a machine share

struct Pace {
  int spins;   // looks before the core is offered to others
  int yields;  // looks between which it is
};

// Chooses by whether there are more ranks than cores.
Pace pace_for(int ranks, int cores);

// Sleeps until the bell moves from `seen`, or for `nanoseconds`.
void sleep_on(Bed& bed, std::uint32_t seen, std::uint64_t nanoseconds);

// Wakes a rank if it sleeps.
void wake(Bed& bed);

void yield_core();

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `ready()`; gives up at `deadline` (of `now_ns`) or after `nap` asleep, so that the
// caller can look around. Returns whether it is ready.
template <class Ready>
bool wait_a_while(Bed& bed, const Pace& pace, std::uint64_t nap, Ready&& ready) {
  for (int i = 0; i < pace.spins; ++i) {
    if (ready()) return true;
    relax();
  }
  for (int i = 0; i < pace.yields; ++i) {
    if (ready()) return true;
    yield_core();
  }
  const std::uint32_t seen = bed.bell.load(std::memory_order_seq_cst);
  bed.sleeping.fetch_add(1, std::memory_order_seq_cst);
  const bool already = ready();
  if (!already) sleep_on(bed, seen, nap);
  bed.sleeping.fetch_sub(1, std::memory_order_seq_cst);
  return already || ready();
}

}  // namespace phalanx
