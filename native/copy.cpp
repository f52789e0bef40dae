#include "copy.hpp"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace phalanx {

namespace {

#if defined(__SSE2__)
constexpr std::size_t kLine = 64;

// Stores whole lines past the cache; what is not a whole line of the target goes the ordinary way.
void stream(char* into, const char* from, std::size_t bytes) {
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(into) % kLine) % kLine;
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

}  // namespace

void copy_bytes(char* into, const char* from, std::size_t bytes) {
#if defined(__SSE2__)
  if (bytes >= kStreamed) {
    stream(into, from, bytes);
    return;
  }
#endif
  std::memcpy(into, from, bytes);
}

}  // namespace phalanx
