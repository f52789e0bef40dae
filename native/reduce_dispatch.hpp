// Which kernels run: one table per instruction set, chosen once, at run time.
//
// Internal to the arithmetic and its tests; the engine sees only reduce.hpp.
//
// This header is included by translation units that are compiled for instruction sets the machine
// may not have. It must therefore define no inline function and include no header that does
// (<vector>, <algorithm>, <span>...): the linker keeps one copy of such a function, and it may keep
// the one with AVX-512 in it.

#pragma once

#include <cstddef>

#include "types.hpp"

namespace phalanx {

struct KernelArguments {
  const void* const* in;
  std::size_t inputs;  // at least one
  void* const* out;    // each may be one of `in`, at the same position
  std::size_t outputs;
  std::size_t count;  // of elements
  double factor;      // of premul_sum
};

using Kernel = void (*)(const KernelArguments&);

struct KernelTable {
  const char* name;
  Kernel kernels[kDTypes][kReduceOps];  // null where the type does not have the operation
};

namespace baseline {
extern const KernelTable table;
}

#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
#endif

// The tables this machine can run, the best one first; ends with a null pointer.
const KernelTable* const* available_tables();

// Makes every later reduction use `table`. For tests and benchmarks; not while others reduce.
void use_table(const KernelTable& table);

}  // namespace phalanx
