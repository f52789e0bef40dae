#include "copy.hpp"

#include <algorithm>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "sync.hpp"

namespace phalanx {

namespace {

constexpr std::size_t kMeasurable = 16 * 1024;    // bytes; shorter copies are too noisy to measure
constexpr std::uint64_t kMeasureInterval = 64;    // copies from one measurement to the next
constexpr double kRemoteCost = 2.0;  // cached copies this many times as slow met remote lines

double cost_per_byte(char* into, const char* from, std::size_t bytes, bool bypass_cache) {
  const std::uint64_t before = now_ns();
  copy_bytes(into, from, bytes, bypass_cache);
  return static_cast<double>(now_ns() - before) / static_cast<double>(bytes);
}

}  // namespace

void AdaptiveCopier::copy(char* into, const char* from, std::size_t bytes) {
  const std::uint64_t turn = bytes < kMeasurable ? kMeasureInterval : copies_++ % kMeasureInterval;
  if (turn == 0)
    streaming_cost_ = cost_per_byte(into, from, bytes, true);
  else if (turn == 1)
    bypass_cache_ = cost_per_byte(into, from, bytes, false) > kRemoteCost * streaming_cost_;
  else
    copy_bytes(into, from, bytes, bypass_cache_);
}

void stream_bytes(char* into, const char* from, std::size_t bytes) {
#if defined(__SSE2__)
  // Whole lines of the target are streamed; the rest is stored through the cache.
  const std::size_t head =
      std::min(bytes, (kCacheLine - reinterpret_cast<std::uintptr_t>(into) % kCacheLine) % kCacheLine);
  std::memcpy(into, from, head);
  const std::size_t whole = (bytes - head) / kCacheLine * kCacheLine;
  const char* const source = from + head;
  char* const target = into + head;
  for (std::size_t i = 0; i < whole; i += kCacheLine) {
    __m128i line[4];
    std::memcpy(line, source + i, kCacheLine);
    for (std::size_t k = 0; k < 4; ++k)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + 16 * k), line[k]);
  }
  // A release store does not order non-temporal stores, and a counter is published after them.
  _mm_sfence();
  std::memcpy(target + whole, source + whole, bytes - head - whole);
#else
  std::memcpy(into, from, bytes);
#endif
}

}  // namespace phalanx
