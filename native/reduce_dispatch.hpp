// One table of kernels per instruction set, selected at run time. Internal to reduce.cpp and its tests.
//
// This header is included by translation units that are compiled for instruction sets the machine may
// not have. It must not define inline functions or include headers that do (<vector>, <algorithm>,
// <span>...): the linker keeps one copy of such a function, possibly the one with AVX-512 code.

#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace phalanx {

struct KernelArguments {
  const void* const* in;
  std::size_t inputs;  // at least one
  void* const* out;    // each may be one of `in`, at the same position
  std::size_t outputs;
  std::size_t count;  // of elements
  double factor;      // of premul_sum
  double divisor;     // of avg on floats, and of trees
  const std::uint8_t* merges = nullptr;  // of a tree; null for the order of the inputs
  bool streams = false;  // with merges: store past the cache into outputs that begin with a cache line
};

using Kernel = void (*)(const KernelArguments&);

struct KernelTable {
  const char* name;
  Kernel kernels[kDTypes][kReduceOps];  // null where the type does not have the operation
  Kernel trees[kDTypes];  // sums in the order of a tree; null for all but real floats
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

// The tables that this machine supports, best first; ends with a null pointer.
const KernelTable* const* available_tables();

// Selects the table of all later reductions. For tests.
void use_table(const KernelTable& table);

}  // namespace phalanx
