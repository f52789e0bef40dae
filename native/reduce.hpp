// Element-wise reduction of several buffers, in the order of the buffers.
//
// The order is part of the contract: element i of the result is ((in[0][i] + in[1][i]) + in[2][i])
// and so on, on every instruction set, so equal inputs give equal bits everywhere (except that any NaN
// may replace any other). float16 and bfloat16 are computed in float32 and rounded once, at the end;
// an average is the correctly rounded quotient. Integers wrap around. min and max return NaN if any
// input is NaN, and the first of zeros of both signs.

#pragma once

#include <cstddef>
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

// "avx512", "avx2", "neon" or "baseline".
const char* instruction_set();

}  // namespace phalanx
