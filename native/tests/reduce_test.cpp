// Compares every kernel of every instruction set of this machine with a scalar reference.
//
// Results are compared bit by bit, but any NaN equals any NaN. Compile with -ffp-contract=off: the
// reference must not be fused either.

#include "reduce.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "reduce_dispatch.hpp"
#include "reduce_reference.hpp"

namespace {

using namespace phalanx;
using namespace phalanx::reference;

long passed = 0;
long failed = 0;
std::string context;  // of the current check, for messages

void check(bool good, const char* what, int line) {
  ++(good ? passed : failed);
  if (!good && failed <= 20) std::printf("line %d: %s [%s]\n", line, what, context.c_str());
}

#define CHECK(condition) check((condition), #condition, __LINE__)

// -------------------------------------------------------------------------------------- the checks

// Inputs and the expected result; every length is a prefix.
template <class T>
struct Problem {
  Reduction reduction;
  std::vector<std::vector<T>> inputs;
  std::vector<T> answer;

  Problem(const Reduction& r, std::size_t n, std::size_t count) : reduction(r), inputs(n) {
    for (auto& input : inputs) {
      for (std::size_t i = 0; i < count; ++i) input.push_back(random_element<T>());
    }
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<T> column;
      for (const auto& input : inputs) column.push_back(input[i]);
      answer.push_back(expected(reduction, column));
    }
  }
};

// A copy of one input, `shift` elements into its storage, with guards against writes out of bounds. Half
// of the time there is no guard after it, so that AddressSanitizer reports a read out of bounds.
template <class T>
struct Shifted {
  static constexpr std::size_t kGuard = 64;
  std::vector<T> storage;
  std::size_t shift;
  std::size_t count;

  Shifted(const std::vector<T>& from, std::size_t by, std::size_t n)
      : storage(by + n + (n % 2 ? kGuard : 0)), shift(by), count(n) {
    auto* bytes = reinterpret_cast<unsigned char*>(storage.data());
    std::fill_n(bytes, storage.size() * sizeof(T), static_cast<unsigned char>(0xa5));
    std::copy_n(from.data(), n, data());
  }
  T* data() { return storage.data() + shift; }
  bool guards_whole() const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(storage.data());
    for (std::size_t i = 0; i < storage.size() * sizeof(T); ++i) {
      const bool inside = i >= shift * sizeof(T) && i < (shift + count) * sizeof(T);
      if (!inside && bytes[i] != 0xa5) return false;
    }
    return true;
  }
  bool holds(const std::vector<T>& answer) {
    for (std::size_t i = 0; i < count; ++i) {
      if (!same(data()[i], answer[i])) return false;
    }
    return true;
  }
};

template <class T>
std::vector<Shifted<T>> lay_out(const std::vector<std::vector<T>>& inputs, std::size_t count) {
  std::vector<Shifted<T>> buffers;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    buffers.emplace_back(inputs[r], (count / 2 + 3 * r) % 8, count);
  }
  return buffers;
}

template <class T>
std::vector<Shifted<T>> lay_out(const Problem<T>& problem, std::size_t count) {
  return lay_out(problem.inputs, count);
}

template <class T>
void check_apart(const Problem<T>& problem, std::size_t count) {
  auto buffers = lay_out(problem, count);
  Shifted<T> out(problem.inputs[0], count % 5, count);
  std::vector<const void*> in;
  for (auto& buffer : buffers) in.push_back(buffer.data());
  reduce(problem.reduction, in, out.data(), count);
  CHECK(out.holds(problem.answer));
  CHECK(out.guards_whole());
}

template <class T>
void check_in_place(const Problem<T>& problem, std::size_t count) {
  auto buffers = lay_out(problem, count);
  std::vector<const void*> in;
  for (auto& buffer : buffers) in.push_back(buffer.data());
  const std::size_t mine = count % buffers.size();
  reduce(problem.reduction, in, buffers[mine].data(), count);
  for (std::size_t r = 0; r < buffers.size(); ++r) {
    CHECK(buffers[r].holds(r == mine ? problem.answer : problem.inputs[r]));
    CHECK(buffers[r].guards_whole());
  }
}

template <class T>
void check_to_all(const Problem<T>& problem, std::size_t count) {
  auto buffers = lay_out(problem, count);
  std::vector<void*> pointers;
  for (auto& buffer : buffers) pointers.push_back(buffer.data());
  reduce_to_all(problem.reduction, pointers, count);
  for (auto& buffer : buffers) {
    CHECK(buffer.holds(problem.answer));
    CHECK(buffer.guards_whole());
  }
}

template <class T>
void check_problem(const Problem<T>& problem) {
  const std::size_t longest = problem.answer.size();
  for (std::size_t count = 0; count <= longest; count += count < 300 ? 1 : 1237) {
    // Every length with two inputs, a sample with other numbers of inputs.
    if (problem.inputs.size() != 2 && count > 20 && count % 7 != 0) continue;
    check_apart(problem, count);
    check_in_place(problem, count);
    check_to_all(problem, count);
  }
}

template <class T>
double factor_for(std::size_t n) {
  if constexpr (std::is_integral_v<T>) return std::is_signed_v<T> && n % 2 ? -3.0 : 7.0;
  return 1.0 / 3.0;  // inexact, so that a fused multiply-add is detected
}

void check_all_kernels(const KernelTable& table) {
  visit_types([&]<class T>(T, DType type, const char* type_name) {
    for (int op = 0; op < kReduceOps; ++op) {
      if (!supports(type, static_cast<ReduceOp>(op))) continue;
      for (std::size_t n : {1u, 2u, 3u, 4u, 5u, 9u}) {
        context = std::string(table.name) + " " + type_name + " " + op_names[op] + " of " +
                  std::to_string(n);
        const Reduction reduction{type, static_cast<ReduceOp>(op), factor_for<T>(n)};
        check_problem(Problem<T>(reduction, n, n == 2 ? 5000 : 1400));
      }
    }
  });
}

// More inputs than fit the element type.
void check_many_inputs() {
  visit_types([]<class T>(T, DType type, const char* type_name) {
    context = std::string("many inputs, ") + type_name;
    if (!supports(type, ReduceOp::avg)) return;
    const Problem<T> problem({type, ReduceOp::avg, 1.0}, 300, 37);
    check_apart(problem, 37);
    check_to_all(problem, 37);
  });
}

// Every half float, scaled to exercise all kinds of rounding.
template <class T>
void check_every_half(DType type) {
  std::vector<T> every(65536);
  for (std::size_t i = 0; i < every.size(); ++i) every[i].bits = static_cast<std::uint16_t>(i);
  for (double factor : {1.0, 1.0 / 3.0, 3.0, std::ldexp(1.0, -12), std::ldexp(1.3, -20), 65519.0}) {
    std::vector<T> out(every.size());
    const void* in = every.data();
    const Reduction reduction{type, ReduceOp::premul_sum, factor};
    reduce(reduction, {&in, 1}, out.data(), every.size());
    long wrong = 0;
    for (std::size_t i = 0; i < every.size(); ++i) {
      wrong += !same(out[i], expected(reduction, std::vector<T>{every[i]}));
    }
    CHECK(wrong == 0);
  }
}

// float32 sums exactly between two half floats round to the even one.
void check_ties() {
  const std::uint16_t a[] = {0x3c00, 0x3c01, 0x3c00, 0x7bff, 0x7bff};  // 1, 1 + 2^-10, 1, 65504...
  const std::uint16_t b[] = {0x1000, 0x1000, 0x1001, 0x4c00, 0x4bff};  // 2^-11, 2^-11, more, 16...
  const std::uint16_t sum[] = {0x3c00, 0x3c02, 0x3c01, 0x7c00, 0x7bff};
  std::uint16_t out[5];
  const void* in[] = {a, b};
  reduce({DType::float16, ReduceOp::sum}, in, out, 5);
  CHECK(std::memcmp(out, sum, sizeof sum) == 0);
}

// ---------------------------------------------------------------------------------------- the trees

using Merges = std::vector<std::uint8_t>;

enum class Order { left, right, balanced, random };

std::unique_ptr<const TreeNode> tree_of(Order order, std::size_t n) {
  return make_tree(0, n, [&](std::size_t first, std::size_t last) {
    switch (order) {
      case Order::left: return last - 1;
      case Order::right: return first + 1;
      case Order::balanced: return first + (last - first + 1) / 2;
      default: return first + 1 + random_bits() % (last - first - 1);
    }
  });
}

template <class T>
struct TreeProblem {
  DType type;
  Merges merges;
  double divisor;
  std::vector<std::vector<T>> inputs;
  std::vector<T> answer;

  TreeProblem(DType of, const TreeNode& tree, double by, std::size_t count) : type(of), divisor(by) {
    append_merges(tree, merges);
    inputs.resize(merges.size());
    for (auto& input : inputs) {
      for (std::size_t i = 0; i < count; ++i) input.push_back(random_element<T>());
    }
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<T> column;
      for (const auto& input : inputs) column.push_back(input[i]);
      answer.push_back(quotient(tree_sum(tree, column), divisor));
    }
  }
};

// The first `in_place` inputs are outputs, and `apart` other buffers.
template <class T>
void check_tree(const TreeProblem<T>& problem, std::size_t count, std::size_t in_place,
                std::size_t apart) {
  auto buffers = lay_out(problem.inputs, count);
  std::vector<const void*> in;
  for (auto& buffer : buffers) in.push_back(buffer.data());
  std::vector<Shifted<T>> others(apart, Shifted<T>(problem.inputs[0], count % 5, count));
  std::vector<void*> out;
  for (std::size_t r = 0; r < in_place; ++r) out.push_back(buffers[r].data());
  for (auto& other : others) out.push_back(other.data());
  sum_tree(problem.type, in, problem.merges, problem.divisor, out, count, count % 2 == 0);
  for (std::size_t r = 0; r < buffers.size(); ++r) {
    CHECK(buffers[r].holds(r < in_place ? problem.answer : problem.inputs[r]));
    CHECK(buffers[r].guards_whole());
  }
  for (auto& other : others) {
    CHECK(other.holds(problem.answer));
    CHECK(other.guards_whole());
  }
}

// Past the cache, into buffers that begin with a cache line.
template <class T>
void check_streamed_tree(const TreeProblem<T>& problem, std::size_t count) {
  auto buffers = lay_out(problem.inputs, count);
  std::vector<const void*> in;
  for (auto& buffer : buffers) in.push_back(buffer.data());
  alignas(kCacheLine) T results[2][640 / sizeof(T)];
  void* const out[] = {results[0], results[1]};
  for (auto& result : results) std::memset(static_cast<void*>(result), 0xa5, sizeof result);
  sum_tree(problem.type, in, problem.merges, problem.divisor, out, count, true);
  for (auto& result : results) {
    bool right = true;
    for (std::size_t i = 0; i < count; ++i) right = right && same(result[i], problem.answer[i]);
    CHECK(right);
    const auto* const bytes = reinterpret_cast<const unsigned char*>(result);
    CHECK(std::all_of(bytes + count * sizeof(T), bytes + sizeof result,
                      [](unsigned char byte) { return byte == 0xa5; }));
  }
}

void check_all_trees(const KernelTable& table) {
  visit_types([&]<class T>(T, DType type, const char* type_name) {
    if constexpr (std::is_floating_point_v<T> || is_complex<T> || is_half<T>) {
      const std::size_t longest = 520 / sizeof(T) + 3;
      for (std::size_t n : {1u, 2u, 3u, 4u, 5u, 8u, 13u, 26u, 40u}) {
        for (Order order : {Order::left, Order::right, Order::balanced, Order::random}) {
          const auto tree = tree_of(order, n);
          Merges merges;
          append_merges(*tree, merges);
          if (!is_tree(merges)) continue;  // too deep
          for (double divisor : {1.0, 4.0, 0.5, 3.0, static_cast<double>(n) + 0.1}) {
            context = std::string(table.name) + " tree of " + std::to_string(n) + " " + type_name +
                      " in order " + std::to_string(static_cast<int>(order));
            const TreeProblem<T> problem(type, *tree, divisor, longest);
            for (std::size_t count = 0; count <= longest; count += count < 3 ? 1 : 11 + n) {
              check_tree(problem, count, 0, 1);
              check_tree(problem, count, 1 + count % n, count % 3);
              check_streamed_tree(problem, count);
            }
            check_tree(problem, longest, n, 0);
          }
        }
      }
    }
  });
}

// A tree that is summed in two places, with the sums stored in between, gives the same bits.
template <class T>
void check_split_tree(DType type) {
  const auto tree = make_tree(0, 12, [](std::size_t first, std::size_t last) {
    return first == 0 && last == 12 ? 7 : first + (last - first + 1) / 2;
  });
  const TreeProblem<T> whole(type, *tree, 1.0, 1000);
  Merges left, right;
  append_merges(*tree->left, left);
  append_merges(*tree->right, right);
  std::vector<T> sums[2] = {std::vector<T>(1000), std::vector<T>(1000)};
  std::vector<const void*> in;
  for (const auto& input : whole.inputs) in.push_back(input.data());
  const std::span<const void* const> all = in;
  void* const out[] = {sums[0].data(), sums[1].data()};
  sum_tree(type, all.first(7), left, 1.0, {out, 1}, 1000);
  sum_tree(type, all.last(5), right, 1.0, {out + 1, 1}, 1000);
  const void* const both[] = {out[0], out[1]};
  sum_tree(type, both, Merges{0, 1}, 1.0, {out, 1}, 1000);
  long wrong = 0;
  for (std::size_t i = 0; i < 1000; ++i) wrong += !same(sums[0][i], whole.answer[i]);
  CHECK(wrong == 0);
}

void check_tree_orders() {
  context = "orders of trees";
  for (std::size_t n = 1; n <= kMaxTreeInputs; n += n < 50 ? 1 : 29) {
    for (Order order : {Order::left, Order::right, Order::balanced}) {
      Merges merges;
      append_merges(*tree_of(order, n), merges);
      CHECK(is_tree(merges) == (order != Order::right || n <= kMaxTreeDepth));
      merges.back() = static_cast<std::uint8_t>(merges.back() + 1);
      CHECK(!is_tree(merges));
    }
  }
  Merges too_many(kMaxTreeInputs + 1, 1);
  too_many[0] = 0;
  CHECK(!is_tree(too_many));
  for (const Merges& merges : {Merges{}, Merges{1}, Merges{0, 0}, Merges{0, 2}, Merges{1, 0},
                               Merges{0, 1, 0}, Merges{0, 2, 1, 0, 1}}) {
    CHECK(!is_tree(merges));
  }
  for (double divisor : {1.0, 3.0, 0x1p-126, 0x1p126}) CHECK(is_tree_divisor(divisor));
  for (double divisor : {0.0, -1.0, 0x1p-127, 0x1p127, HUGE_VAL, std::nan("")}) {
    CHECK(!is_tree_divisor(divisor));
  }
  visit_types([]<class T>(T, DType type, const char*) {
    CHECK(supports_tree(type) == (std::is_floating_point_v<T> || is_complex<T> || is_half<T>));
  });
  CHECK(!supports_tree(static_cast<DType>(kDTypes)));
}

void check_large() {
  const Problem<float> problem({DType::float32, ReduceOp::avg}, 2, (1 << 20) + 13);
  check_apart(problem, problem.answer.size());
  check_to_all(problem, problem.answer.size());
}

void check_supports() {
  context = "supports";
  visit_types([]<class T>(T, DType type, const char*) {
    constexpr bool integral = std::is_integral_v<T>;
    constexpr bool boolean = std::is_same_v<T, Boolean>;
    const bool wanted[kReduceOps] = {
        true,           !boolean,       true,                           // sum, avg, product
        !is_complex<T>, !is_complex<T>,                                 // min, max
        integral || boolean, integral || boolean, integral || boolean,  // band, bor, bxor
        !boolean,                                                       // premul_sum
    };
    for (int op = 0; op < kReduceOps; ++op) {
      CHECK(supports(type, static_cast<ReduceOp>(op)) == wanted[op]);
    }
  });
  CHECK(!supports(static_cast<DType>(kDTypes), ReduceOp::sum));
  CHECK(!supports(DType::float32, static_cast<ReduceOp>(kReduceOps)));
  for (auto t = available_tables(); *t != nullptr; ++t) {
    for (int type = 0; type < kDTypes; ++type) {
      for (int op = 0; op < kReduceOps; ++op) {
        CHECK(((*t)->kernels[type][op] != nullptr) ==
              supports(static_cast<DType>(type), static_cast<ReduceOp>(op)));
      }
    }
  }
}

}  // namespace

int main() {
  std::printf("best instruction set: %s\n", instruction_set());
  check_supports();
  check_tree_orders();
  for (auto table = available_tables(); *table != nullptr; ++table) {
    use_table(**table);
    CHECK(std::strcmp(instruction_set(), (*table)->name) == 0);
    check_all_kernels(**table);
    check_many_inputs();
    check_all_trees(**table);
    context = std::string((*table)->name) + " split tree";
    check_split_tree<float>(DType::float32);
    check_split_tree<Float16>(DType::float16);
    check_split_tree<BFloat16>(DType::bfloat16);
    context = std::string((*table)->name) + " half floats";
    check_every_half<Float16>(DType::float16);
    check_every_half<BFloat16>(DType::bfloat16);
    check_ties();
    context = std::string((*table)->name) + " large";
    check_large();
    std::printf("%-9s checked\n", (*table)->name);
  }
  std::printf("%ld passed, %ld failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
