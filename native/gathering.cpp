// Gradients, copied one behind the other in one call: what torch's operations, or Python's, would take
// for each of them is more than what it takes to copy a small one.

#include <cstring>
#include <vector>

#include "copy.hpp"
#include "dlpack.hpp"
#include "shortcut.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// Gradients of this size are not alone: together they do not stay in the cache until they are reduced.
constexpr std::size_t kLarge = std::size_t{4} << 20;

struct Piece {
  const char* data;
  std::size_t bytes;
};

// Finds a tensor's memory; null if it is not ordinary memory of the CPU with so many bytes in a row.
Piece memory_of(PyObject* tensor, int type, std::size_t bytes) {
  constexpr Piece none{nullptr, 0};
  if (!is_a_plain_tensor(tensor)) return none;
  if (bytes == 0) return {"", 0};
  Told told;
  if (known.inspect(tensor, &told) != 0) return none;
  const std::size_t found = elements_in_a_row(told) * size_of(static_cast<DType>(type));
  if (told.device_type != kCpu || type_of(told) != type || found != bytes) return none;
  // Negated numbers may be kept as they were, with a mark. DLPack does not tell.
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  if (nb::steal(PyObject_CallMethodNoArgs(tensor, is_neg)).ptr() != Py_False) return none;
  return {static_cast<const char*>(told.data) + told.byte_offset, bytes};
}

// Copies tensors, or does nothing and says so if one of them is anything special, None for instance.
bool gather(std::uintptr_t into, nb::list tensors, nb::list sizes, int type) {
  if (known.inspect == nullptr || nb::len(tensors) != nb::len(sizes)) return false;
  std::vector<Piece> pieces;
  pieces.reserve(nb::len(tensors));
  for (std::size_t i = 0; i < nb::len(tensors); ++i) {
    const auto bytes = nb::cast<std::size_t>(sizes[i]);
    pieces.push_back(memory_of(nb::handle(tensors[i]).ptr(), type, bytes));
    if (pieces.back().data == nullptr) {
      PyErr_Clear();  // whoever copies it in another way finds out what is wrong
      return false;
    }
  }
  const nb::gil_scoped_release release;
  auto* target = reinterpret_cast<char*>(into);
  for (const Piece& piece : pieces) {
    if (piece.bytes < kLarge)
      std::memcpy(target, piece.data, piece.bytes);
    else
      stream_bytes(target, piece.data, piece.bytes);
    target += piece.bytes;
  }
  return true;
}

}  // namespace

void add_gathering(nb::module_& module) {
  module.def("gather", &gather, "into"_a, "tensors"_a, "sizes"_a, "type"_a);
}

}  // namespace phalanx
