// A scalar reference implementation of the reductions, and random inputs.

#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "reduce.hpp"

namespace phalanx::reference {

// ------------------------------------------------------------------------- element types, by name

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
struct Boolean {
  std::uint8_t byte;
};

template <class T>
constexpr bool is_half = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
template <class T>
constexpr bool is_complex =
    std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

template <class Visitor>
void visit_types(Visitor&& visit) {
  visit(float{}, DType::float32, "float32");
  visit(double{}, DType::float64, "float64");
  visit(Float16{}, DType::float16, "float16");
  visit(BFloat16{}, DType::bfloat16, "bfloat16");
  visit(std::int8_t{}, DType::int8, "int8");
  visit(std::int16_t{}, DType::int16, "int16");
  visit(std::int32_t{}, DType::int32, "int32");
  visit(std::int64_t{}, DType::int64, "int64");
  visit(std::uint8_t{}, DType::uint8, "uint8");
  visit(std::uint16_t{}, DType::uint16, "uint16");
  visit(std::uint32_t{}, DType::uint32, "uint32");
  visit(std::uint64_t{}, DType::uint64, "uint64");
  visit(Boolean{}, DType::boolean, "bool");
  visit(std::complex<float>{}, DType::complex64, "complex64");
  visit(std::complex<double>{}, DType::complex128, "complex128");
}

inline const char* const op_names[kReduceOps] = {"sum",  "avg", "product", "min",       "max",
                                          "band", "bor", "bxor",    "premul_sum"};

// ------------------------------------------------------- half floats, by definition

// Rounds to nearest even with `digits` significant bits, none below 2^smallest.
inline double round_to(double value, int digits, int smallest) {
  int exponent = 0;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - digits, smallest));
  return std::nearbyint(value / unit) * unit;
}

inline float decode(Float16 half) {
  const int exponent = half.bits >> 10 & 31;
  const int mantissa = half.bits & 1023;
  double value =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  if (exponent == 31) value = mantissa == 0 ? HUGE_VAL : std::nan("");
  return static_cast<float>(half.bits >> 15 ? -value : value);
}

inline float decode(BFloat16 half) {
  const std::uint32_t bits = std::uint32_t{half.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void encode(float value, Float16& half) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    half.bits = 0x7e00;
    return;
  }
  const double rounded = std::isinf(value) ? HUGE_VAL : std::fabs(round_to(value, 11, -24));
  int bits = 0x7c00;
  if (rounded < std::ldexp(1.0, -14)) {
    bits = static_cast<int>(std::ldexp(rounded, 24));
  } else if (rounded < 65536) {
    int exponent = 0;
    const double fraction = std::frexp(rounded, &exponent);  // in [0.5, 1)
    bits = ((exponent + 14) << 10) + static_cast<int>(std::ldexp(fraction, 11)) - 1024;
  }
  half.bits = static_cast<std::uint16_t>(bits | sign);
}

inline void encode(float value, BFloat16& half) {
  // The rounded value fits a double, and a float unless it overflows to infinity.
  const double exact =
      std::isfinite(value) ? round_to(value, 8, -133) : static_cast<double>(value);
  const float rounded = std::fabs(exact) > std::numeric_limits<float>::max()
                            ? std::copysign(HUGE_VALF, value)
                            : static_cast<float>(exact);
  std::uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  half.bits = static_cast<std::uint16_t>(std::isnan(value) ? 0x7fc0 : bits >> 16);
}

// ---------------------------------------------------------------------------------- the reference

template <class T>
T minimum(T a, T b) {
  if (a != a) return a;
  if (b != b) return b;
  return b < a ? b : a;
}

template <class T>
T maximum(T a, T b) {
  if (a != a) return a;
  if (b != b) return b;
  return b > a ? b : a;
}

template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return a + b;
  }
}

template <class T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else if constexpr (is_complex<T>) {
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  } else {
    return a * b;
  }
}

template <class T>
T scale(T value, double factor) {
  if constexpr (std::is_signed_v<T> || std::is_floating_point_v<T>) {
    return multiply(value, static_cast<T>(factor));
  } else if constexpr (is_complex<T>) {
    using Real = typename T::value_type;
    const Real real = static_cast<Real>(factor);
    return {value.real() * real, value.imag() * real};
  } else {
    return multiply(value, static_cast<T>(static_cast<std::int64_t>(factor)));
  }
}

template <class T>
T divide(T value, std::size_t by) {
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    return static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(by));
  } else if constexpr (is_complex<T>) {
    using Real = typename T::value_type;
    return {value.real() / static_cast<Real>(by), value.imag() / static_cast<Real>(by)};
  } else {
    return value / static_cast<T>(by);
  }
}

template <class T>
T combine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::product) return multiply(a, b);
  if constexpr (!is_complex<T>) {
    if (op == ReduceOp::min) return minimum(a, b);
    if (op == ReduceOp::max) return maximum(a, b);
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::band) return static_cast<T>(a & b);
    if (op == ReduceOp::bor) return static_cast<T>(a | b);
    if (op == ReduceOp::bxor) return static_cast<T>(a ^ b);
  }
  return add(a, b);
}

template <class T>
T expected(const Reduction& reduction, const std::vector<T>& inputs) {
  if constexpr (is_half<T>) {
    std::vector<float> wide;
    for (T input : inputs) wide.push_back(decode(input));
    T half;
    encode(expected(reduction, wide), half);
    return half;
  } else if constexpr (std::is_same_v<T, Boolean>) {
    const bool all = reduction.op == ReduceOp::product || reduction.op == ReduceOp::min ||
                     reduction.op == ReduceOp::band;
    bool total = inputs[0].byte != 0;
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      const bool next = inputs[r].byte != 0;
      if (reduction.op == ReduceOp::bxor) {
        total = total != next;
      } else {
        total = all ? total && next : total || next;
      }
    }
    return {total};
  } else {
    const bool premul = reduction.op == ReduceOp::premul_sum;
    const auto prepared = [&](T value) { return premul ? scale(value, reduction.factor) : value; };
    T total = prepared(inputs[0]);
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      total = combine(reduction.op, total, prepared(inputs[r]));
    }
    return reduction.op == ReduceOp::avg ? divide(total, inputs.size()) : total;
  }
}

// --------------------------------------------------------------------------------- sums of trees

// A leaf, or the sum of two subtrees.
struct TreeNode {
  std::size_t leaf = 0;
  std::unique_ptr<const TreeNode> left, right;
};

// The tree over leaves [first, last) in which `cut(first, last)` begins the right subtree.
template <class Cut>
std::unique_ptr<const TreeNode> make_tree(std::size_t first, std::size_t last, Cut&& cut) {
  auto node = std::make_unique<TreeNode>();
  node->leaf = first;
  if (last - first == 1) return node;
  const std::size_t middle = cut(first, last);
  node->left = make_tree(first, middle, cut);
  node->right = make_tree(middle, last, cut);
  return node;
}

// Appends one number per leaf: the subtrees that end with it as their right-hand side.
inline void append_merges(const TreeNode& node, std::vector<std::uint8_t>& merges) {
  if (node.left == nullptr) {
    merges.push_back(0);
    return;
  }
  append_merges(*node.left, merges);
  append_merges(*node.right, merges);
  ++merges.back();
}

// Rounded to the element type at every node.
template <class T>
T tree_sum(const TreeNode& node, const std::vector<T>& inputs) {
  if (node.left == nullptr) return inputs[node.leaf];
  const T left = tree_sum(*node.left, inputs), right = tree_sum(*node.right, inputs);
  if constexpr (is_half<T>) {
    T half;
    encode(decode(left) + decode(right), half);
    return half;
  } else {
    return left + right;
  }
}

template <class T>
T quotient(T value, double divisor) {
  if (divisor == 1) return value;
  if constexpr (is_half<T>) {
    encode(decode(value) / static_cast<float>(divisor), value);
    return value;
  } else if constexpr (is_complex<T>) {
    const auto real = static_cast<typename T::value_type>(divisor);
    return {value.real() / real, value.imag() / real};
  } else {
    return value / static_cast<T>(divisor);
  }
}

// -------------------------------------------------------------------------------------- the values

inline std::uint64_t random_bits() {  // splitmix64
  static std::uint64_t state = 1;
  std::uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

// Random bits, moderate numbers and special values.
template <class T>
T random_real() {
  using Limits = std::numeric_limits<T>;
  const T special[] = {T{0}, -T{0}, T{1}, -T{1}, Limits::infinity(), -Limits::infinity(),
                       Limits::quiet_NaN(), Limits::denorm_min(), -Limits::denorm_min(),
                       Limits::min(), Limits::max(), Limits::lowest(), Limits::epsilon()};
  const std::uint64_t bits = random_bits();
  if (bits % 16 == 0) return special[bits / 16 % std::size(special)];
  if (bits % 16 < 10) return static_cast<T>(static_cast<std::int64_t>(bits)) / T(1ull << 62);
  T value;
  const std::uint64_t more = random_bits();
  std::memcpy(&value, &more, sizeof value);
  return value;
}

template <class T>
T random_element() {
  if constexpr (std::is_floating_point_v<T>) {
    return random_real<T>();
  } else if constexpr (is_complex<T>) {
    return {random_real<typename T::value_type>(), random_real<typename T::value_type>()};
  } else if constexpr (std::is_integral_v<T>) {
    using Limits = std::numeric_limits<T>;
    const T special[] = {Limits::min(), Limits::max(), T{0}, T{1}, static_cast<T>(-1)};
    const std::uint64_t bits = random_bits();
    return bits % 8 == 0 ? special[bits / 8 % 5] : static_cast<T>(random_bits());
  } else if constexpr (is_half<T>) {
    T half{static_cast<std::uint16_t>(random_bits())};
    if (random_bits() % 2) encode(random_real<float>(), half);
    return half;
  } else {
    const std::uint64_t bits = random_bits();
    return {static_cast<std::uint8_t>(bits % 4 < 2 ? bits % 4 : bits >> 8)};
  }
}

template <class T>
bool same(T a, T b) {
  if constexpr (is_complex<T>) {
    return same(a.real(), b.real()) && same(a.imag(), b.imag());
  } else if constexpr (std::is_floating_point_v<T>) {
    if (a != a && b != b) return true;
  } else if constexpr (is_half<T>) {
    if (std::isnan(decode(a)) && std::isnan(decode(b))) return true;
  }
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace phalanx::reference
