// Element types, reduce operations, and constants of all files.

#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

// The numbers are part of the layout of the region and are exported to Python: add, never renumber.
enum class DType : std::uint8_t {
  float32 = 0,
  float64 = 1,
  float16 = 2,
  bfloat16 = 3,
  int8 = 4,
  int16 = 5,
  int32 = 6,
  int64 = 7,
  uint8 = 8,
  uint16 = 9,
  uint32 = 10,
  uint64 = 11,
  boolean = 12,
  complex64 = 13,
  complex128 = 14,
};

inline constexpr int kDTypes = 15;

enum class ReduceOp : std::uint8_t {
  sum = 0,
  avg = 1,  // integers truncate
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
  premul_sum = 8,  // each input is multiplied by a factor
};

inline constexpr int kReduceOps = 9;

inline constexpr std::size_t kCacheLine = 64;

// Limits of a sum in the order of a tree: its inputs, and sums that exist at the same time.
inline constexpr std::size_t kMaxTreeInputs = 2048;
inline constexpr std::size_t kMaxTreeDepth = 32;

constexpr std::size_t size_of(DType type) {
  constexpr std::size_t sizes[kDTypes] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16};
  return sizes[static_cast<int>(type)];
}

}  // namespace phalanx
