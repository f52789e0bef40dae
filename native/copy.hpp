// Copying memory past the cache, where that is the quicker way.

#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

// Copies bytes between places that do not overlap.
//
// Past the cache pays when what an operation touches does not stay there: it saves fetching the
// target first. 1.3 to 2 times as fast from 32 MiB on with as much cache, slower up to 16 (Zen 4).
void stream_bytes(char* into, const char* from, std::size_t bytes);

// Copies into memory that other cores have read, over and over: a rank's windows.
//
// To store into a line that another core has read, a core has to take it away from there. From a core
// of the same cache that is cheap. From one of another cache it made such a copy 4 to 8 times as
// long, and an all-reduce of 25 MiB four times; stores past the cache do not mind where the line is, but
// what they store has to come from memory, which costs half as much again where cores share a cache
// (Zen 4). Which of them a rank has to do with changes while it runs: its scheduler, or that of the
// machine under a virtual one, moves it about. So both ways are tried again and again.
class Packer {
 public:
  void copy(char* into, const char* from, std::size_t bytes);

 private:
  std::uint64_t copies_ = 0;
  double past_ = 0;  // nanoseconds that a byte took past the cache, when that was last tried
  bool streams_ = false;
};

}  // namespace phalanx
