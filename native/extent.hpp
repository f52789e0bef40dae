// What ranks must say alike of a call's tensors, in one number.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace phalanx {

// How much there is, and the shape that it has. The amount is whole (below a TiB), for to take one
// for another would be to write where nothing is; of the shape, a tuple, there are 24 bits.
inline std::uint64_t extent_of(std::uint64_t amount, nanobind::handle shape) {
  constexpr int kAmount = 40;
  const Py_hash_t hash = PyObject_Hash(shape.ptr());  // of numbers: alike in every process
  if (hash == -1) throw nanobind::python_error();
  const std::uint64_t mixed = static_cast<std::uint64_t>(hash) * 0x9e3779b97f4a7c15u;
  return amount ^ (mixed >> kAmount << kAmount);
}

}  // namespace phalanx
