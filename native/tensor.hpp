// Tensors without torch's headers: the parts of DLPack's ABI that are needed, and the fingerprint of a
// call that ranks compare.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "types.hpp"

namespace phalanx {

struct DlTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t dims;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

inline constexpr std::int32_t kCpu = 1;

// Returns a DType, or -1 for types that the fast path does not handle.
inline int dtype_of(const DlTensor& tensor) {
  constexpr auto key = [](int code, int bits) { return code << 8 | bits; };
  if (tensor.lanes != 1) return -1;
  switch (key(tensor.code, tensor.bits)) {
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

// Returns the number of elements, or 0 if the tensor is empty or not contiguous.
inline std::uint64_t contiguous_elements(const DlTensor& tensor) {
  std::int64_t count = 1;
  for (std::int32_t dim = tensor.dims; dim-- > 0;) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != count) return 0;
    count *= tensor.shape[dim];
  }
  return static_cast<std::uint64_t>(count);
}

// Combines an amount (exact below 1 TiB, since a mismatch would write out of bounds) with 24 bits of
// the hash of a shape, which is a tuple.
inline std::uint64_t fingerprint_of(std::uint64_t amount, nanobind::handle shape) {
  constexpr int kAmountBits = 40;
  const Py_hash_t hash = PyObject_Hash(shape.ptr());  // of integers: the same in every process
  if (hash == -1) throw nanobind::python_error();
  const std::uint64_t mixed = static_cast<std::uint64_t>(hash) * 0x9e3779b97f4a7c15u;
  return amount ^ (mixed >> kAmountBits << kAmountBits);
}

}  // namespace phalanx
