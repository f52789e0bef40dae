// Chooses the kernels for this machine and hands each reduction to the right one.

#include "reduce.hpp"

#include <atomic>
#include <cassert>

#include "reduce_dispatch.hpp"

namespace phalanx {
namespace {

constexpr std::size_t kMostTables = 3;

struct Available {
  const KernelTable* tables[kMostTables + 1] = {};

  Available() {
    std::size_t found = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    // These ask the operating system too: it must save the wide registers.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      tables[found++] = &avx512::table;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
      tables[found++] = &avx2::table;
    }
#endif
    tables[found] = &baseline::table;
  }
};

const Available& available() {
  static const Available found;
  return found;
}

std::atomic<const KernelTable*>& current_table() {
  static std::atomic<const KernelTable*> current{available().tables[0]};
  return current;
}

Kernel find(const Reduction& reduction) {
  const KernelTable* table = current_table().load(std::memory_order_relaxed);
  const Kernel kernel =
      table->kernels[static_cast<int>(reduction.type)][static_cast<int>(reduction.op)];
  assert(kernel != nullptr && "the engine asks supports() first");
  return kernel;
}

}  // namespace

const KernelTable* const* available_tables() { return available().tables; }

void use_table(const KernelTable& table) {
  current_table().store(&table, std::memory_order_relaxed);
}

const char* instruction_set() { return current_table().load(std::memory_order_relaxed)->name; }

bool supports(DType type, ReduceOp op) {
  const int row = static_cast<int>(type);
  const int column = static_cast<int>(op);
  return row < kDTypes && column < kReduceOps && baseline::table.kernels[row][column] != nullptr;
}

void reduce(const Reduction& reduction, std::span<const void* const> in, void* out,
            std::size_t count) {
  assert(!in.empty());
  find(reduction)({in.data(), in.size(), &out, 1, count, reduction.factor});
}

// One pass through registers, at every size. Measured against it on Zen 4, 2 to 4 buffers of 16 KiB
// to 100 MiB: computing chunks into scratch and copying them out takes 1.2 to 2.8 times as long
// (each line goes through the first-level cache twice more); streaming stores 1.1 to 6 times (the
// lines are in the cache already, having just been read, so there is no fetch to save);
// prefetching gains nothing over the hardware's.
void reduce_to_all(const Reduction& reduction, std::span<void* const> buffers, std::size_t count) {
  assert(!buffers.empty());
  find(reduction)(
      {buffers.data(), buffers.size(), buffers.data(), buffers.size(), count, reduction.factor});
}

}  // namespace phalanx
