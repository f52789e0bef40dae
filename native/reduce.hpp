// The arithmetic: reduces the same elements of several buffers, in the order of the buffers.
//
// The order is part of the contract: element i of the result is ((in[0][i] + in[1][i]) + in[2][i])
// and so on, on every instruction set, so the same inputs give the same bits everywhere (except
// that any NaN may stand for any other). float16 and bfloat16 are computed in float32 and rounded
// once, at the end; an average is the correctly rounded quotient. Integers wrap around. min and max
// give NaN if any input is NaN, and of zeros of both signs the first.

#pragma once

#include <cstddef>
#include <span>

#include "types.hpp"

namespace phalanx {

struct Reduction {
  DType type;
  ReduceOp op;
  double factor = 1.0;  // of premul_sum; for integers it is one, and fits the type
};

// Tells whether the element type has the operation (no bitwise on floats, no order on complex...).
bool supports(DType type, ReduceOp op);

// out[0..count) = reduction of in[r][0..count) over r. There is at least one input. `out` may be
// one of them, at the same position; otherwise buffers do not overlap. No alignment is required
// beyond the element's own.
void reduce(const Reduction& reduction, std::span<const void* const> in, void* out,
            std::size_t count);

// Does the same and stores the result into every buffer, in one pass that reads and writes each
// cache line once. A rank that dies inside leaves a few hundred bytes stored into some buffers and
// not into others. What must survive that calls reduce() into a scratch chunk in the
// region and copies from there; chunks of 4 KiB make that 1.2 times as long when memory is the
// limit and 2.2 times in the cache, 16 KiB 1.6 and 2.8 times (Zen 4, two buffers).
void reduce_to_all(const Reduction& reduction, std::span<void* const> buffers, std::size_t count);

// The name of the instruction set in use: "avx512", "avx2", "neon", "baseline".
const char* instruction_set();

}  // namespace phalanx
