// Element-wise reduction of several buffers, in the order of the buffers.
//
// The order is part of the contract: element i of the result is ((in[0][i] + in[1][i]) + in[2][i])
// and so on, on every instruction set, so equal inputs give equal bits everywhere (except that any NaN
// may replace any other). float16 and bfloat16 are computed in float32 and rounded once, at the end;
// an average is the correctly rounded quotient. Integers wrap around. min and max return NaN if any
// input is NaN, and the first of zeros of both signs.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "types.hpp"

namespace phalanx {

struct Reduction {
  DType type;
  ReduceOp op;
  double factor = 1.0;  // of premul_sum; for integer types an integer that fits the type
};

// Whether the element type has the operation (no bitwise on floats, no order on complex...).
bool supports(DType type, ReduceOp op);

// out[0..count) = reduction of in[r][0..count) over r, with at least one input. `out` may be one of the
// inputs; otherwise buffers do not overlap. They need only the alignment of their elements.
void reduce(const Reduction& reduction, std::span<const void* const> in, void* out,
            std::size_t count);

// Stores the result into every buffer, in one pass that reads and writes each cache line once. A rank
// that dies in it leaves a few hundred bytes stored into some buffers and not into others.
void reduce_to_all(const Reduction& reduction, std::span<void* const> buffers, std::size_t count);

// -- sums in the order of a binary tree
//
// The order is given by one number per input. Inputs are pushed on a stack in their order. After input
// r, the two topmost sums, a below b, are replaced by a + b, merges[r] times. One sum is left in the
// end. {0, 1, 1, 1} adds from the left; {0, 1, 0, 2} is the balanced tree of four inputs.
//
// A part of the tree may have been summed and stored elsewhere, and the bits must not depend on where.
// So every sum is rounded to the element type, also of float16 and bfloat16, which `reduce` rounds once.

// Whether the element type is a float or complex type.
bool supports_tree(DType type);

// Whether `merges` is the order of a tree: no merge without two sums, one sum at the end, at most
// `kMaxTreeInputs` inputs, and at most `kMaxTreeDepth` sums at the same time.
bool is_tree(std::span<const std::uint8_t> merges);

// Whether sums can be divided by it: from 2^-126 to 2^126, so that float32 has its reciprocal.
bool is_tree_divisor(double divisor);

// Stores the sum of all inputs, divided by `divisor`, into every output. The quotient is correctly
// rounded; for float16 and bfloat16 first to float32. Each output may be one of the inputs; otherwise
// buffers do not overlap. Where outputs are not in the cache, `bypass_cache` saves fetching them first;
// it has no effect unless they begin with a cache line.
void sum_tree(DType type, std::span<const void* const> in, std::span<const std::uint8_t> merges,
              double divisor, std::span<void* const> out, std::size_t count,
              bool bypass_cache = false);

// "avx512", "avx2", "neon" or "baseline".
const char* instruction_set();

}  // namespace phalanx
