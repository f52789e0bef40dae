// Copies that bypass the cache, where that is faster.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace phalanx {

// Copies with non-temporal stores; source and target do not overlap.
//
// This pays when an operation touches more than fits in the cache, since the target need not be
// fetched first: 1.3 to 2 times as fast from 32 MiB on with as much cache, slower up to 16 (Zen 4).
void stream_bytes(char* into, const char* from, std::size_t bytes);

inline void copy_bytes(char* into, const char* from, std::size_t bytes, bool bypass_cache) {
  if (bypass_cache)
    stream_bytes(into, from, bytes);
  else
    std::memcpy(into, from, bytes);
}

// Copies into memory that other cores have read: a rank's windows.
//
// A store into a line that another core has read must take the line away from that core. That is
// cheap within one cache. Across caches it made such a copy 4 to 8 times as long, and an all-reduce of
// 25 MiB four times. Non-temporal stores do not depend on where the line is, but readers then fetch
// it from memory, which costs half as much again where cores share a cache (Zen 4). The scheduler, or
// that of the host of a virtual machine, moves ranks while they run, so both ways are measured again
// and again.
class AdaptiveCopier {
 public:
  void copy(char* into, const char* from, std::size_t bytes);

 private:
  std::uint64_t copies_ = 0;
  double streaming_cost_ = 0;  // nanoseconds per byte of the last measured streaming copy
  bool bypass_cache_ = false;
};

}  // namespace phalanx
