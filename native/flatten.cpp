// Flattens gradients into a bucket in one call: calling torch or Python for each would take longer than
// copying a small one.

#include <vector>

#include "copy.hpp"
#include "fast_path.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// A bucket with gradients of this size does not stay in the cache until it is reduced.
constexpr std::size_t kLarge = std::size_t{4} << 20;

constexpr int kSingle = static_cast<int>(DType::float32);
constexpr int kDouble = static_cast<int>(DType::float64);

struct Piece {
  const char* data;
  std::size_t bytes;
};

// Returns the memory of a contiguous CPU tensor of this type and length, or null.
Piece memory_of(PyObject* tensor, int type, std::size_t bytes) {
  constexpr Piece none{nullptr, 0};
  if (!is_plain_tensor(tensor)) return none;
  if (bytes == 0) return {"", 0};
  DlTensor view;
  if (!read_tensor(tensor, view)) return none;
  const std::size_t found = contiguous_elements(view) * size_of(static_cast<DType>(type));
  if (dtype_of(view) != type || found != bytes) return none;
  return {static_cast<const char*>(view.data) + view.byte_offset, bytes};
}

// Whether one of our own tensors still shows this memory. Users can point it elsewhere: `x.grad.data = y`.
bool shows(PyObject* tensor, const char* address, int type, std::size_t bytes) {
  DlTensor view;
  if (bytes == 0) return true;
  if (runtime.inspect(tensor, &view) != 0) return false;
  const std::size_t found = contiguous_elements(view) * size_of(static_cast<DType>(type));
  const char* const data = static_cast<const char*>(view.data) + view.byte_offset;
  return data == address && dtype_of(view) == type && found == bytes;
}

template <typename T>
void copy_scaled(char* target, const Piece& piece, T factor) {
  const auto* from = reinterpret_cast<const T*>(piece.data);
  auto* to = reinterpret_cast<T*>(target);
  for (std::size_t i = 0; i < piece.bytes / sizeof(T); ++i) to[i] = from[i] * factor;
}

// Not by 0, which must turn NaN into 0.
bool can_scale(int type, double factor) {
  return factor != 0 && (type == kSingle || type == kDouble);
}

// Copies and scales tensors. Returns false, with nothing done, if one of them is None or not plain, or if
// one of the views no longer shows its part of the target.
bool flatten(
    std::uintptr_t into, nb::list tensors, nb::list views, nb::list sizes, int type, double factor) {
  if (runtime.inspect == nullptr) return false;
  if (nb::len(tensors) != nb::len(sizes) || nb::len(views) != nb::len(sizes)) return false;
  if (factor != 1 && !can_scale(type, factor)) return false;
  std::vector<Piece> pieces;
  pieces.reserve(nb::len(tensors));
  auto* target = reinterpret_cast<char*>(into);
  for (std::size_t i = 0; i < nb::len(tensors); ++i) {
    const auto bytes = nb::cast<std::size_t>(sizes[i]);
    PyObject* const tensor = nb::handle(tensors[i]).ptr();
    PyObject* const view = nb::handle(views[i]).ptr();
    const bool intact = shows(view, target, type, bytes);
    // They are the same where autograd has accumulated into the bucket.
    pieces.push_back(tensor == view ? Piece{target, bytes} : memory_of(tensor, type, bytes));
    if (!intact || pieces.back().data == nullptr) {
      PyErr_Clear();  // the caller's fallback reports what is wrong
      return false;
    }
    target += bytes;
  }
  const nb::gil_scoped_release release;
  target = reinterpret_cast<char*>(into);
  for (const Piece& piece : pieces) {
    if (factor == 1) {
      if (target != piece.data) copy_bytes(target, piece.data, piece.bytes, piece.bytes >= kLarge);
    } else if (type == kSingle) {
      copy_scaled(target, piece, static_cast<float>(factor));
    } else {
      copy_scaled(target, piece, factor);
    }
    target += piece.bytes;
  }
  return true;
}

}  // namespace

void register_flatten(nb::module_& module) {
  module.def("flatten", &flatten, "into"_a, "tensors"_a, "views"_a, "sizes"_a, "type"_a, "factor"_a);
}

}  // namespace phalanx
