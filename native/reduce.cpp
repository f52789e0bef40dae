// Selects the kernels for this machine.

#include "reduce.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
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
    // These also check that the operating system saves the wide registers.
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
  assert(kernel != nullptr && "callers check supports()");
  return kernel;
}

// A complex number is a pair of reals here: sums and quotients by a real work part by part.
DType part_of(DType type) {
  if (type == DType::complex64) return DType::float32;
  if (type == DType::complex128) return DType::float64;
  return type;
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
  find(reduction)({in.data(), in.size(), &out, 1, count, reduction.factor,
                   static_cast<double>(in.size())});
}

// One pass through registers, at every size. Alternatives on Zen 4, with 2 to 4 buffers of 16 KiB to
// 100 MiB: chunks in scratch memory, copied out, take 1.2 to 2.8 times as long; streaming stores 1.1 to
// 6 times, since the lines are already in the cache; prefetching gains nothing.
void reduce_to_all(const Reduction& reduction, std::span<void* const> buffers, std::size_t count) {
  assert(!buffers.empty());
  find(reduction)({buffers.data(), buffers.size(), buffers.data(), buffers.size(), count,
                   reduction.factor, static_cast<double>(buffers.size())});
}

bool supports_tree(DType type) {
  return static_cast<int>(type) < kDTypes &&
         baseline::table.trees[static_cast<int>(part_of(type))] != nullptr;
}

bool is_tree(std::span<const std::uint8_t> merges) {
  if (merges.size() > kMaxTreeInputs) return false;
  std::size_t sums = 0;
  for (const std::size_t merged : merges) {
    if (++sums > kMaxTreeDepth || merged >= sums) return false;
    sums -= merged;
  }
  return sums == 1;
}

namespace {

// Computes with subnormal numbers, whatever the thread's mode is. A sum may run on a thread of the user,
// who has asked for them to be flushed to zero, or on the driver's.
class SubnormalScope {
 public:
  SubnormalScope() {
#if defined(__x86_64__)
    if ((before_ & kFlush) != 0) _mm_setcsr(before_ & ~kFlush);
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if ((before_ & kFlush) != 0) asm volatile("msr fpcr, %0" : : "r"(before_ & ~kFlush));
#endif
  }
  ~SubnormalScope() {
#if defined(__x86_64__)
    if ((before_ & kFlush) != 0) _mm_setcsr(before_);
#elif defined(__aarch64__)
    if ((before_ & kFlush) != 0) asm volatile("msr fpcr, %0" : : "r"(before_));
#endif
  }
  SubnormalScope(const SubnormalScope&) = delete;
  SubnormalScope& operator=(const SubnormalScope&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kFlush = 0x8040;  // results and operands
  const unsigned before_ = _mm_getcsr();
#elif defined(__aarch64__)
  static constexpr std::uint64_t kFlush = std::uint64_t{1} << 24;
  std::uint64_t before_ = 0;
#endif
};

}  // namespace

bool is_tree_divisor(double divisor) { return divisor >= 0x1p-126 && divisor <= 0x1p126; }

// From the registers past the cache: with two ranks and 25 MiB on Zen 4, a sum that is stored apart from
// its inputs takes 1.3 times as long as one in place, through the cache 2.0, and in chunks through scratch
// memory that are then streamed 2.5 times.
void sum_tree(DType type, std::span<const void* const> in, std::span<const std::uint8_t> merges,
              double divisor, std::span<void* const> out, std::size_t count, bool bypass_cache) {
  assert(supports_tree(type) && is_tree(merges) && is_tree_divisor(divisor));
  assert(in.size() == merges.size());
  const DType part = part_of(type);
  const bool from_left =
      std::all_of(merges.begin() + 1, merges.end(), [](std::uint8_t merged) { return merged == 1; });
  const bool streams = bypass_cache && std::all_of(out.begin(), out.end(), [](void* each) {
    return reinterpret_cast<std::uintptr_t>(each) % kCacheLine == 0;
  });
  const SubnormalScope with_subnormals;
  const KernelTable* table = current_table().load(std::memory_order_relaxed);
  table->trees[static_cast<int>(part)]({in.data(), in.size(), out.data(), out.size(),
                                        count * size_of(type) / size_of(part), 1.0, divisor,
                                        from_left && !streams ? nullptr : merges.data(), streams});
#if defined(__x86_64__)
  // A release store does not order non-temporal stores, and a counter is published after them.
  if (streams) _mm_sfence();
#endif
}

}  // namespace phalanx
