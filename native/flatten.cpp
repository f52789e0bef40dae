// Flattens gradients into a bucket, or folds them into sums of micro-batches, in one call: calling torch
// or Python for each would take longer than copying a small one.

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "copy.hpp"
#include "fast_path.hpp"
#include "reduce.hpp"

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

// As `dtype_of`, but with complex types, which the fast path of calls does not handle.
int element_type(const DlTensor& tensor) {
  constexpr std::uint8_t kComplex = 5;
  if (tensor.code != kComplex || tensor.lanes != 1) return dtype_of(tensor);
  if (tensor.bits == 64) return static_cast<int>(DType::complex64);
  return tensor.bits == 128 ? static_cast<int>(DType::complex128) : -1;
}

bool is_complex(int type) {
  return type == static_cast<int>(DType::complex64) || type == static_cast<int>(DType::complex128);
}

// Like the negative bit, the bit of lazy conjugation is not part of DLPack.
bool is_conjugated(PyObject* tensor) {
  static PyObject* const is_conj = PyUnicode_InternFromString("is_conj");
  return nb::steal(PyObject_CallMethodNoArgs(tensor, is_conj)).ptr() != Py_False;
}

// Returns the memory of a contiguous CPU tensor of this type and length, or null.
Piece memory_of(PyObject* tensor, int type, std::size_t bytes) {
  constexpr Piece none{nullptr, 0};
  if (!is_plain_tensor(tensor)) return none;
  if (bytes == 0) return {"", 0};
  DlTensor view;
  if (!read_tensor(tensor, view)) return none;
  const std::size_t found = contiguous_elements(view) * size_of(static_cast<DType>(type));
  if (element_type(view) != type || found != bytes) return none;
  if (is_complex(type) && is_conjugated(tensor)) return none;
  return {static_cast<const char*>(view.data) + view.byte_offset, bytes};
}

// Whether one of our own tensors still shows this memory. Users can point it elsewhere: `x.grad.data = y`.
bool shows(PyObject* tensor, const char* address, int type, std::size_t bytes) {
  DlTensor view;
  if (bytes == 0) return true;
  if (runtime.inspect(tensor, &view) != 0) return false;
  const std::size_t found = contiguous_elements(view) * size_of(static_cast<DType>(type));
  const char* const data = static_cast<const char*>(view.data) + view.byte_offset;
  return data == address && element_type(view) == type && found == bytes;
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

// Negative zero is the identity of addition: x + -0.0 has the bits of x for every x; -0.0 + 0.0 is 0.0.
void fill_with_negative_zeros(char* target, std::size_t bytes, int type) {
  constexpr std::size_t kBlock = 4096;
  constexpr std::uint16_t half = 0x8000;  // of both types
  constexpr float single = -0.0f;
  constexpr double twice = -0.0;
  const std::size_t size = size_of(static_cast<DType>(type)) / (is_complex(type) ? 2 : 1);
  const void* zero = &twice;
  if (size == sizeof half) zero = &half;
  if (size == sizeof single) zero = &single;
  char block[kBlock];
  for (std::size_t at = 0; at < std::min(kBlock, bytes); at += size)
    std::memcpy(block + at, zero, size);
  for (std::size_t at = 0; at < bytes; at += kBlock)
    std::memcpy(target + at, block, std::min(kBlock, bytes - at));
}

// The order nodes[0] + (nodes[1] + (... + last)).
struct RightFold {
  std::vector<const void*> in;
  std::vector<std::uint8_t> merges;

  explicit RightFold(std::size_t inputs) : in(inputs), merges(inputs) {
    if (inputs != 0) merges.back() = static_cast<std::uint8_t>(inputs - 1);
  }
};

// Adds the gradients of a micro-batch to the sums of earlier ones: into = nodes[0] + (nodes[1] + (... +
// gradients)), with the bits of `sum_tree`. A missing gradient is the identity. Without nodes it copies.
// Gradients lie at multiples of `alignment` bytes. Returns false, with nothing done, if a tensor is not
// plain, shares memory with the sums, or if one of the views no longer shows its part of what is at
// `views_at`, laid out like the target.
bool fold(std::uintptr_t into, const std::vector<std::uintptr_t>& nodes, nb::list tensors,
          nb::list views, std::uintptr_t views_at, nb::list sizes, int type, std::size_t alignment) {
  const auto of = static_cast<DType>(type);
  if (alignment == 0) throw nb::value_error("alignment must be at least 1");
  const auto padded = [alignment](std::size_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
  };
  if (runtime.inspect == nullptr || type < 0 || type >= kDTypes || !supports_tree(of)) return false;
  if (nodes.size() >= kMaxTreeDepth) throw nb::value_error("there are too many nodes");
  if (!nodes.empty() && nodes[0] != into) throw nb::value_error("nodes[0] must be the target");
  const bool has_views = nb::len(views) != 0;
  if (nb::len(tensors) != nb::len(sizes) || (has_views && nb::len(views) != nb::len(sizes)))
    return false;
  std::vector<Piece> pieces;  // without data where there is no gradient
  pieces.reserve(nb::len(tensors));
  auto* target = reinterpret_cast<char*>(into);
  auto* shown = reinterpret_cast<char*>(views_at);
  for (std::size_t i = 0; i < nb::len(tensors); ++i) {
    const auto bytes = nb::cast<std::size_t>(sizes[i]);
    PyObject* const tensor = nb::handle(tensors[i]).ptr();
    const bool missing = tensor == Py_None;
    pieces.push_back(missing ? Piece{nullptr, bytes} : memory_of(tensor, type, bytes));
    const bool intact = !has_views || shows(nb::handle(views[i]).ptr(), shown, type, bytes);
    const bool accumulated = !nodes.empty() && pieces.back().data == target;  // not a leaf any more
    if (!intact || accumulated || (!missing && pieces.back().data == nullptr)) {
      PyErr_Clear();  // the caller's fallback reports what is wrong
      return false;
    }
    target += padded(bytes);
    shown += padded(bytes);
  }
  RightFold with_leaf(nodes.size() + 1), without(nodes.size());
  const nb::gil_scoped_release release;
  std::size_t at = 0;
  for (const Piece& piece : pieces) {
    char* const out = reinterpret_cast<char*>(into) + at;
    RightFold& sum = piece.data != nullptr ? with_leaf : without;
    for (std::size_t k = 0; k < nodes.size(); ++k)
      sum.in[k] = reinterpret_cast<const char*>(nodes[k]) + at;
    if (piece.data != nullptr) sum.in.back() = piece.data;
    if (sum.in.empty()) {
      fill_with_negative_zeros(out, piece.bytes, type);
    } else if (sum.in.size() > 1) {
      void* const outputs[] = {out};
      sum_tree(of, sum.in, sum.merges, 1.0, outputs, piece.bytes / size_of(of));
    } else if (sum.in[0] != out) {
      copy_bytes(out, piece.data, piece.bytes, piece.bytes >= kLarge);
    }
    at += padded(piece.bytes);
  }
  return true;
}

}  // namespace

void register_flatten(nb::module_& module) {
  module.def("flatten", &flatten, "into"_a, "tensors"_a, "views"_a, "sizes"_a, "type"_a, "factor"_a);
  module.def("fold", &fold, "into"_a, "nodes"_a, "tensors"_a, "views"_a, "views_at"_a, "sizes"_a,
             "type"_a, "alignment"_a = 1);
}

}  // namespace phalanx
