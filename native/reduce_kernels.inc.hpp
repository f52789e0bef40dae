// The kernels, written once and compiled once per instruction set.
//
// Each reduce_<isa>.cpp defines PHALANX_ISA (a namespace), PHALANX_ISA_NAME and
// PHALANX_VECTOR_BYTES, and includes this file. Everything here is in an anonymous namespace, and no
// header with inline functions is included: see reduce_dispatch.hpp.
//
// A kernel is an operation over a format. The *format* loads elements into vector lanes and stores them
// back (half floats widen to float32 lanes; a bool becomes 0 or 1; a complex number is two lanes). The
// *operation* computes on lanes. The *loop* is the same for all: it holds a few accumulators in
// registers, runs over the inputs in their order, and only then stores, so that an output may be an
// input and each line of memory is visited once.
//
// Vectors are those of the compiler (vector_size), so nothing depends on the auto-vectoriser. Two rules
// keep the bits equal everywhere: -ffp-contract=off (no fused multiply-add), and averages that are
// correctly rounded quotients. Which NaN is returned, and its sign, is not defined.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "reduce_dispatch.hpp"

#define INLINE [[gnu::always_inline]] inline

namespace phalanx::PHALANX_ISA {
namespace {

constexpr std::size_t kVectorBytes = PHALANX_VECTOR_BYTES;

template <class T, std::size_t bytes>
struct MakeVector {
  typedef T Type __attribute__((vector_size(bytes)));
};

template <class T, std::size_t bytes>
using VectorOf = typename MakeVector<T, bytes>::Type;

template <class T>
using Vector = VectorOf<T, kVectorBytes>;

template <class To, class From>
INLINE To as(From from) {
  return __builtin_bit_cast(To, from);
}

#include "reduce_half.inc.hpp"

// ---------------------------------------------------------------------------------------- formats

template <class V>
INLINE V load_bits(const char* from) {
  V bits;
  __builtin_memcpy(&bits, from, sizeof bits);  // no alignment assumed: one unaligned load
  return bits;
}

template <class V>
INLINE void store_bits(char* to, V bits) {
  __builtin_memcpy(to, &bits, sizeof bits);
}

// Stores past the cache, where there is an instruction for it; `to` is a multiple of the length.
template <class V>
INLINE void stream_bits(char* to, V bits) {
#if defined(__x86_64__)
#if PHALANX_VECTOR_BYTES >= 64
  if constexpr (sizeof bits == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), as<__m512i>(bits));
#endif
#if PHALANX_VECTOR_BYTES >= 32
  if constexpr (sizeof bits == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), as<__m256i>(bits));
#endif
  if constexpr (sizeof bits == 16)
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), as<__m128i>(bits));
#endif
  store_bits(to, bits);
}

// Elements computed in their own type.
template <class T>
struct Plain {
  using Lane = T;
  using Lanes = Vector<T>;
  static constexpr std::size_t kElement = sizeof(T);
  static constexpr std::size_t kBytes = kVectorBytes;  // of memory per vector of lanes

  INLINE static Lanes load(const char* from) { return load_bits<Lanes>(from); }
  INLINE static Lanes encode(Lanes lanes) { return lanes; }
  INLINE static void store(char* to, Lanes lanes) { store_bits(to, lanes); }
};

// A pair of T, real part first. Addition and scaling work lane by lane, as on reals.
template <class T>
struct Complex : Plain<T> {
  static constexpr std::size_t kElement = 2 * sizeof(T);
};

struct Float16 {
  using Lane = float;
  using Lanes = Floats;
  static constexpr std::size_t kElement = 2;
  static constexpr std::size_t kBytes = kVectorBytes / 2;

  INLINE static Lanes round(Lanes lanes) { return round_to_float16(lanes); }
  INLINE static Lanes load(const char* from) { return from_float16(load_bits<Halves>(from)); }
  INLINE static Halves encode(Lanes lanes) { return to_float16(lanes); }
  INLINE static void store(char* to, Lanes lanes) { store_bits(to, encode(lanes)); }
};

struct BFloat16 {
  using Lane = float;
  using Lanes = Floats;
  static constexpr std::size_t kElement = 2;
  static constexpr std::size_t kBytes = kVectorBytes / 2;

  INLINE static Lanes round(Lanes lanes) { return round_to_bfloat16(lanes); }
  INLINE static Lanes load(const char* from) { return from_bfloat16(load_bits<Halves>(from)); }
  INLINE static Halves encode(Lanes lanes) { return to_bfloat16(lanes); }
  INLINE static void store(char* to, Lanes lanes) { store_bits(to, encode(lanes)); }
};

// Any non-zero byte is true (a bool tensor may be a view of other bytes); 0 or 1 is stored.
struct Boolean : Plain<std::uint8_t> {
  INLINE static Lanes load(const char* from) {
    return as<Lanes>(load_bits<Lanes>(from) != 0) & 1;
  }
};

#include "reduce_operations.inc.hpp"

// --------------------------------------------------------------------------------------- the loop

// Load and store an incomplete vector.
template <class F>
INLINE typename F::Lanes load_part(const char* from, std::size_t bytes) {
  char padded[F::kBytes] = {};
  __builtin_memcpy(padded, from, bytes);
  return F::load(padded);
}

template <class F>
INLINE void store_part(char* to, typename F::Lanes lanes, std::size_t bytes) {
  char padded[F::kBytes];
  F::store(padded, lanes);
  __builtin_memcpy(to, padded, bytes);
}

template <class Op>
INLINE auto input_part(const Op& op, const void* in, std::size_t at, std::size_t bytes) {
  return op.prepare(load_part<typename Op::Format>(static_cast<const char*>(in) + at, bytes));
}

template <class Op>
void reduce_part(const Op& op, const KernelArguments& a, std::size_t at, std::size_t bytes) {
  auto total = input_part(op, a.in[0], at, bytes);
  for (std::size_t r = 1; r < a.inputs; ++r) {
    total = op.combine(total, input_part(op, a.in[r], at, bytes));
  }
  total = op.finish(total);
  for (std::size_t r = 0; r < a.outputs; ++r) {
    store_part<typename Op::Format>(static_cast<char*>(a.out[r]) + at, total, bytes);
  }
}

// All loads come before the first store.
template <std::size_t vectors, class Op>
INLINE void reduce_block(const Op& op, const KernelArguments& a, std::size_t at) {
  using F = typename Op::Format;
  typename F::Lanes total[vectors];
  const char* first = static_cast<const char*>(a.in[0]) + at;
  for (std::size_t v = 0; v < vectors; ++v) total[v] = op.prepare(F::load(first + v * F::kBytes));
  for (std::size_t r = 1; r < a.inputs; ++r) {
    const char* next = static_cast<const char*>(a.in[r]) + at;
    for (std::size_t v = 0; v < vectors; ++v) {
      total[v] = op.combine(total[v], op.prepare(F::load(next + v * F::kBytes)));
    }
  }
  for (auto& lanes : total) lanes = op.finish(lanes);
  for (std::size_t r = 0; r < a.outputs; ++r) {
    char* out = static_cast<char*>(a.out[r]) + at;
    for (std::size_t v = 0; v < vectors; ++v) F::store(out + v * F::kBytes, total[v]);
  }
}

// Four vectors hide the latency of an addition and leave registers for operands on AVX2.
template <class Op>
constexpr std::size_t kBlock = 4 * Op::Format::kBytes;

// Reduces whole blocks and returns their length in bytes. Arguments are passed by value, since the
// compiler must assume that a store into a buffer changes what a reference refers to.
template <class Op>
INLINE std::size_t reduce_blocks(const Op& op, const KernelArguments a) {
  const std::size_t bytes = a.count * Op::Format::kElement / kBlock<Op> * kBlock<Op>;
  for (std::size_t at = 0; at < bytes; at += kBlock<Op>) reduce_block<4>(op, a, at);
  return bytes;
}

template <std::size_t inputs, std::size_t outputs, class Op>
std::size_t reduce_fixed_blocks(const Op& op, const KernelArguments& a) {
  const void* in[inputs];
  void* out[outputs];
  for (std::size_t r = 0; r < inputs; ++r) in[r] = a.in[r];
  for (std::size_t r = 0; r < outputs; ++r) out[r] = a.out[r];
  return reduce_blocks(op, {in, inputs, out, outputs, a.count, a.factor, a.divisor});
}

// Loops for few buffers keep every pointer in a register, which is a quarter faster while the data is in
// the cache. Instantiated only for what gradients need, to limit code size.
template <class Op>
std::size_t reduce_few_blocks(const Op& op, const KernelArguments& a) {
  const bool to_all = a.outputs == a.inputs;
  if (to_all || a.outputs == 1) {
    if (a.inputs == 2) {
      return to_all ? reduce_fixed_blocks<2, 2>(op, a) : reduce_fixed_blocks<2, 1>(op, a);
    }
    if (a.inputs == 3) {
      return to_all ? reduce_fixed_blocks<3, 3>(op, a) : reduce_fixed_blocks<3, 1>(op, a);
    }
    if (a.inputs == 4) {
      return to_all ? reduce_fixed_blocks<4, 4>(op, a) : reduce_fixed_blocks<4, 1>(op, a);
    }
  }
  return reduce_blocks(op, a);
}

template <class Op>
void reduce_rest(const Op& op, const KernelArguments& a, std::size_t at) {
  constexpr std::size_t vector = Op::Format::kBytes;
  const std::size_t bytes = a.count * Op::Format::kElement;
  for (; bytes - at >= vector; at += vector) reduce_block<1>(op, a, at);
  if (at < bytes) reduce_part(op, a, at, bytes - at);
}

template <class Op>
void run(const KernelArguments& a) {
  const Op op(a);
  reduce_rest(op, a, reduce_blocks(op, a));
}

template <class Op>
void run_hot(const KernelArguments& a) {
  const Op op(a);
  reduce_rest(op, a, reduce_few_blocks(op, a));
}

template <class F>
void run_average(const KernelArguments& a) {
  if (is_power_of_two(a.divisor)) return run_hot<AverageOfPowerOfTwo<Sum<F>>>(a);
  run_hot<Average<Sum<F>>>(a);
}

// -------------------------------------------------------------------------------------- the trees

// Combines the inputs in the order of a tree; `load(r, v)` returns vector v of input r. The topmost sum
// is in registers, so that an input which is merged at once costs no more than in the order of inputs.
template <std::size_t vectors, class Op, class Load>
INLINE void combine_tree(const Op& op, const KernelArguments& a,
                         typename Op::Format::Lanes (&top)[vectors], Load&& load) {
  typename Op::Format::Lanes below[kMaxTreeDepth - 1][vectors];
  std::size_t depth = 0;
  for (std::size_t v = 0; v < vectors; ++v) top[v] = load(0, v);
  for (std::size_t r = 1; r < a.inputs; ++r) {
    std::size_t merges = a.merges[r];
    if (merges == 0) {
      for (std::size_t v = 0; v < vectors; ++v) below[depth][v] = top[v];
      for (std::size_t v = 0; v < vectors; ++v) top[v] = load(r, v);
      ++depth;
      continue;
    }
    for (std::size_t v = 0; v < vectors; ++v) top[v] = op.combine(top[v], load(r, v));
    while (--merges > 0) {
      --depth;
      for (std::size_t v = 0; v < vectors; ++v) top[v] = op.combine(below[depth][v], top[v]);
    }
  }
  for (auto& lanes : top) lanes = op.finish(lanes);
}

// As in `reduce_block`, all loads come before the first store.
template <std::size_t vectors, bool streams, class Op>
INLINE void tree_block(const Op& op, const KernelArguments& a, std::size_t at) {
  using F = typename Op::Format;
  typename F::Lanes total[vectors];
  combine_tree(op, a, total, [&](std::size_t r, std::size_t v) {
    return F::load(static_cast<const char*>(a.in[r]) + at + v * F::kBytes);
  });
  for (std::size_t r = 0; r < a.outputs; ++r) {
    char* out = static_cast<char*>(a.out[r]) + at;
    for (std::size_t v = 0; v < vectors; ++v) {
      if constexpr (streams)
        stream_bits(out + v * F::kBytes, F::encode(total[v]));
      else
        F::store(out + v * F::kBytes, total[v]);
    }
  }
}

template <class Op>
void tree_part(const Op& op, const KernelArguments& a, std::size_t at, std::size_t bytes) {
  using F = typename Op::Format;
  typename F::Lanes total[1];
  combine_tree(op, a, total, [&](std::size_t r, std::size_t) {
    return load_part<F>(static_cast<const char*>(a.in[r]) + at, bytes);
  });
  for (std::size_t r = 0; r < a.outputs; ++r) {
    store_part<F>(static_cast<char*>(a.out[r]) + at, total[0], bytes);
  }
}

template <bool streams, class Op>
void run_tree_order(const Op& op, const KernelArguments a) {  // by value: see `reduce_blocks`
  const std::size_t bytes = a.count * Op::Format::kElement;
  std::size_t at = 0;
  for (; bytes - at >= kBlock<Op>; at += kBlock<Op>) tree_block<4, streams>(op, a, at);
  for (; bytes - at >= Op::Format::kBytes; at += Op::Format::kBytes)
    tree_block<1, streams>(op, a, at);
  if (at < bytes) tree_part(op, a, at, bytes - at);
}

template <class Op>
void run_any_order(const KernelArguments& a) {
  if (a.merges == nullptr) return run_hot<Op>(a);
  const Op op(a);
  a.streams ? run_tree_order<true>(op, a) : run_tree_order<false>(op, a);
}

template <class S>
void run_tree(const KernelArguments& a) {
  if (a.divisor == 1 && a.inputs <= 2 && !a.streams)
    return run_hot<Sum<typename S::Format>>(a);  // stores round
  if (a.divisor == 1) return run_any_order<S>(a);
  if (is_power_of_two(a.divisor)) return run_any_order<AverageOfPowerOfTwo<S>>(a);
  run_any_order<Average<S>>(a);
}

// -------------------------------------------------------------------------------------- the table

struct Row {
  Kernel kernels[kReduceOps] = {};
  constexpr Kernel& operator[](ReduceOp op) { return kernels[static_cast<int>(op)]; }
};

template <class F>
constexpr Row row_of_reals() {
  Row row;
  row[ReduceOp::sum] = run_hot<Sum<F>>;
  row[ReduceOp::avg] = run_average<F>;
  row[ReduceOp::product] = run<Product<F>>;
  row[ReduceOp::min] = run<Min<F>>;
  row[ReduceOp::max] = run<Max<F>>;
  row[ReduceOp::premul_sum] = run_hot<PremulSum<F>>;
  return row;
}

template <class F>
constexpr Row row_of_complex() {
  Row row;
  row[ReduceOp::sum] = run<Sum<F>>;
  row[ReduceOp::avg] = run_average<F>;
  row[ReduceOp::product] = run<ComplexProduct<F>>;
  row[ReduceOp::premul_sum] = run<PremulSum<F>>;
  return row;
}

template <class T, class Unsigned, class Wide>
constexpr Row row_of_integers() {
  using Modular = Plain<Unsigned>;
  Row row;
  row[ReduceOp::sum] = run<Sum<Modular>>;
  row[ReduceOp::avg] = run<IntegerAverage<Modular, T, Wide>>;
  row[ReduceOp::product] = run<Product<Modular>>;
  row[ReduceOp::min] = run<Min<Plain<T>>>;
  row[ReduceOp::max] = run<Max<Plain<T>>>;
  row[ReduceOp::band] = run<And<Modular>>;
  row[ReduceOp::bor] = run<Or<Modular>>;
  row[ReduceOp::bxor] = run<Xor<Modular>>;
  row[ReduceOp::premul_sum] = run<PremulSum<Modular>>;
  return row;
}

constexpr Row row_of_booleans() {
  Row row;
  row[ReduceOp::sum] = row[ReduceOp::max] = row[ReduceOp::bor] = run<Or<Boolean>>;
  row[ReduceOp::product] = row[ReduceOp::min] = row[ReduceOp::band] = run<And<Boolean>>;
  row[ReduceOp::bxor] = run<Xor<Boolean>>;
  return row;
}

constexpr KernelTable make_table() {
  KernelTable made{PHALANX_ISA_NAME, {}, {}};
  const auto set = [&made](DType type, const Row& row) {
    for (int op = 0; op < kReduceOps; ++op) {
      made.kernels[static_cast<int>(type)][op] = row.kernels[op];
    }
  };
  set(DType::float32, row_of_reals<Plain<float>>());
  set(DType::float64, row_of_reals<Plain<double>>());
  set(DType::float16, row_of_reals<Float16>());
  set(DType::bfloat16, row_of_reals<BFloat16>());
  set(DType::int8, row_of_integers<std::int8_t, std::uint8_t, std::int32_t>());
  set(DType::int16, row_of_integers<std::int16_t, std::uint16_t, std::int32_t>());
  set(DType::int32, row_of_integers<std::int32_t, std::uint32_t, std::int32_t>());
  set(DType::int64, row_of_integers<std::int64_t, std::uint64_t, std::int64_t>());
  set(DType::uint8, row_of_integers<std::uint8_t, std::uint8_t, std::uint32_t>());
  set(DType::uint16, row_of_integers<std::uint16_t, std::uint16_t, std::uint32_t>());
  set(DType::uint32, row_of_integers<std::uint32_t, std::uint32_t, std::uint32_t>());
  set(DType::uint64, row_of_integers<std::uint64_t, std::uint64_t, std::uint64_t>());
  set(DType::boolean, row_of_booleans());
  set(DType::complex64, row_of_complex<Complex<float>>());
  set(DType::complex128, row_of_complex<Complex<double>>());
  made.trees[static_cast<int>(DType::float32)] = run_tree<Sum<Plain<float>>>;
  made.trees[static_cast<int>(DType::float64)] = run_tree<Sum<Plain<double>>>;
  made.trees[static_cast<int>(DType::float16)] = run_tree<RoundedSum<Float16>>;
  made.trees[static_cast<int>(DType::bfloat16)] = run_tree<RoundedSum<BFloat16>>;
  return made;
}

}  // namespace

constinit const KernelTable table = make_table();

}  // namespace phalanx::PHALANX_ISA
