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

constexpr int kSingle = static_cast<int>(DType::float32);
constexpr int kDouble = static_cast<int>(DType::float64);

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

void copy_bytes(char* target, const Piece& piece) {
  if (target == piece.data) return;  // autograd has added to what is in the bucket
  if (piece.bytes < kLarge)
    std::memcpy(target, piece.data, piece.bytes);
  else
    stream_bytes(target, piece.data, piece.bytes);
}

template <typename T>
void copy_scaled(char* target, const Piece& piece, T factor) {
  const auto* from = reinterpret_cast<const T*>(piece.data);
  auto* to = reinterpret_cast<T*>(target);
  for (std::size_t i = 0; i < piece.bytes / sizeof(T); ++i) to[i] = from[i] * factor;
}

// Not by 0, which has to make a zero even of what is not a number.
bool can_scale(int type, double factor) {
  return factor != 0 && (type == kSingle || type == kDouble);
}

// Copies tensors and multiplies them on the way, or does nothing and says so if one of them is anything
// special, None for instance.
bool gather(std::uintptr_t into, nb::list tensors, nb::list sizes, int type, double factor) {
  if (known.inspect == nullptr || nb::len(tensors) != nb::len(sizes)) return false;
  if (factor != 1 && !can_scale(type, factor)) return false;
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
    if (factor == 1)
      copy_bytes(target, piece);
    else if (type == kSingle)
      copy_scaled(target, piece, static_cast<float>(factor));
    else
      copy_scaled(target, piece, factor);
    target += piece.bytes;
  }
  return true;
}

}  // namespace

void add_gathering(nb::module_& module) {
  module.def("gather", &gather, "into"_a, "tensors"_a, "sizes"_a, "type"_a, "factor"_a);
}

}  // namespace phalanx
