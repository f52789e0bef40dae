// What a tensor is, told by itself: the parts of DLPack's ABI that are needed, and no header of torch.

#pragma once

#include <cstdint>

#include "types.hpp"

namespace phalanx {

struct Told {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t dims;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;  // of elements
  std::uint64_t byte_offset;
};

inline constexpr std::int32_t kCpu = 1;

inline int type_of(const Told& told) {
  constexpr auto key = [](int code, int bits) { return code << 8 | bits; };
  if (told.lanes != 1) return -1;
  switch (key(told.code, told.bits)) {
    case key(2, 32): return static_cast<int>(DType::float32);
    case key(2, 64): return static_cast<int>(DType::float64);
    case key(2, 16): return static_cast<int>(DType::float16);
    case key(4, 16): return static_cast<int>(DType::bfloat16);
    case key(0, 8): return static_cast<int>(DType::int8);
    case key(0, 16): return static_cast<int>(DType::int16);
    case key(0, 32): return static_cast<int>(DType::int32);
    case key(0, 64): return static_cast<int>(DType::int64);
    case key(1, 8): return static_cast<int>(DType::uint8);
    default: return -1;
  }
}

// The number of elements, or 0 if there is none or they do not lie in a row.
inline std::uint64_t elements_in_a_row(const Told& told) {
  std::int64_t count = 1;
  for (std::int32_t dim = told.dims; dim-- > 0;) {
    if (told.shape[dim] != 1 && told.strides[dim] != count) return 0;
    count *= told.shape[dim];
  }
  return static_cast<std::uint64_t>(count);
}

}  // namespace phalanx
