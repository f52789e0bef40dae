#include "copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "sync.hpp"

namespace phalanx {

namespace {

#if defined(__SSE2__)
// Stores whole lines past the cache; what is not a whole line of the target goes the ordinary way.
void stream(char* into, const char* from, std::size_t bytes) {
  const std::size_t head =
      std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(into) % kLine) % kLine);
  std::memcpy(into, from, head);
  const std::size_t whole = (bytes - head) / kLine * kLine;
  const char* const source = from + head;
  char* const target = into + head;
  for (std::size_t i = 0; i < whole; i += kLine) {
    __m128i line[4];
    std::memcpy(line, source + i, kLine);
    for (std::size_t k = 0; k < 4; ++k)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + 16 * k), line[k]);
  }
  // Such stores are not ordered by a release: they must have happened before a counter says so.
  _mm_sfence();
  std::memcpy(target + whole, source + whole, bytes - head - whole);
}
#endif

constexpr std::size_t kTelling = 16 * 1024;  // bytes; smaller copies say little
constexpr std::uint64_t kTrial = 64;         // copies from one trial to the next
constexpr double kFar = 2.0;  // times as long as past the cache: a line was far away

template <class Copy>
double per_byte(std::size_t bytes, Copy&& copy) {
  const std::uint64_t before = now_ns();
  copy();
  return static_cast<double>(now_ns() - before) / static_cast<double>(bytes);
}

}  // namespace

void Packer::copy(char* into, const char* from, std::size_t bytes) {
  const auto past = [&] { stream_bytes(into, from, bytes); };
  const auto through = [&] { std::memcpy(into, from, bytes); };
  const std::uint64_t turn = bytes < kTelling ? kTrial : copies_++ % kTrial;
  if (turn == 0) {
    past_ = per_byte(bytes, past);
  } else if (turn == 1) {
    streams_ = per_byte(bytes, through) > kFar * past_;
  } else if (streams_) {
    past();
  } else {
    through();
  }
}

void stream_bytes(char* into, const char* from, std::size_t bytes) {
#if defined(__SSE2__)
  stream(into, from, bytes);
#else
  std::memcpy(into, from, bytes);
#endif
}

}  // namespace phalanx
