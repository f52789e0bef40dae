// Shared by the native tests: threads as ranks, and sizes so small that each test wraps around the rings
// and takes many windows.

#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine.hpp"

using namespace phalanx;

inline std::atomic<long> passed{0}, failed{0};

inline void check(bool good, const char* what, const char* file, int line) {
  if (good) {
    ++passed;
    return;
  }
  ++failed;
  std::printf("%s:%d: %s\n", file, line, what);
}
#define CHECK(condition) check((condition), #condition, __FILE__, __LINE__)

inline int report() {
  std::printf("%ld passed, %ld failed\n", passed.load(), failed.load());
  return failed.load() == 0 ? 0 : 1;
}

constexpr std::uint64_t kSecond = 1'000'000'000;

inline Sizes tiny() {
  Sizes sizes;
  sizes.small = 64;
  sizes.window = 192;
  sizes.windows = 3;
  sizes.channel = 64;
  sizes.piece = 128;
  sizes.streamed = 4096;
  sizes.slab = 1 << 20;
  return sizes;
}

// Who makes progress; `mixed` starts a driver on odd ranks.
enum class DriverMode { callers, threads, mixed };
inline DriverMode driver_mode = DriverMode::callers;

using Body = std::function<void(Engine&, int)>;

inline void run(int ranks, const Body& body) {
  Region region = Region::create("memfd", ranks, tiny());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Engine engine(region.alias(), rank, 2);
      if (driver_mode == DriverMode::threads || (driver_mode == DriverMode::mixed && rank % 2 == 1))
        engine.start_driver();
      body(engine, rank);
    });
  for (auto& thread : threads) thread.join();
}

// A tensor of one rank, in ordinary memory or in the region.
class Buffer {
 public:
  Buffer(Engine& engine, std::size_t count, bool shared, std::size_t at = 0)
      : own_(shared ? 0 : count), count_(count) {
    const Layout& layout = engine.region().layout();
    data_ = shared ? reinterpret_cast<int*>(engine.region().bytes(layout.slab(engine.rank()) + at))
                   : own_.data();
  }
  int& operator[](std::size_t i) { return data_[i]; }
  char* bytes() { return reinterpret_cast<char*>(data_); }
  std::size_t size() const { return count_ * sizeof(int); }
  void fill(int value) {
    for (std::size_t i = 0; i < count_; ++i) data_[i] = value;
  }
  void fill_floats(float value) { fill(std::bit_cast<int>(value)); }
  bool holds_floats(float value) const { return holds(std::bit_cast<int>(value)); }
  bool holds(int value) const {
    return std::all_of(data_, data_ + count_, [&](int each) { return each == value; });
  }
  // Whether the result and the only input of a tree have these values.
  bool holds_slots(float result, float input) const {
    for (std::size_t i = 0; i < count_; ++i)
      if (data_[i] != std::bit_cast<int>(i < count_ / 2 ? result : input)) return false;
    return true;
  }

 private:
  std::vector<int> own_;
  std::size_t count_;
  int* data_;
};

inline Request in_place(Collective kind, char* data, std::size_t bytes, int root = 0) {
  Request request;
  request.kind = kind;
  request.reduction = {DType::int32, ReduceOp::sum, 1.0};
  request.root = root;
  request.input = data;
  request.bytes = request.output_bytes = request.fingerprint = bytes;
  request.outputs = {data};
  return request;
}

inline Request in_place(Collective kind, Buffer& buffer, int root = 0) {
  return in_place(kind, buffer.bytes(), buffer.size(), root);
}

// An ordered all-reduce of float32. `count` of every `stride` elements are a slot; the first is the result.
inline Request tree_sum(char* data, std::size_t count, std::size_t stride,
                        std::vector<std::uint16_t> inputs, std::vector<std::uint8_t> merges,
                        double divisor = 1.0) {
  Request request;
  request.kind = Collective::ordered_allreduce;
  request.reduction = {DType::float32, ReduceOp::sum, divisor};
  request.input = data + stride * sizeof(float);
  request.output_bytes = count * sizeof(float);
  request.bytes = request.output_bytes +
                  (*std::max_element(inputs.begin(), inputs.end()) - 1u) * stride * sizeof(float);
  request.outputs = {data};
  request.fingerprint = request.output_bytes;
  for (const auto number : inputs) request.fingerprint = request.fingerprint * 31 + number;
  for (const auto number : merges) request.fingerprint = request.fingerprint * 31 + number;
  const auto tree = std::make_shared<Tree>();
  tree->inputs = std::move(inputs);
  tree->merges = std::move(merges);
  tree->slot_bytes = stride * sizeof(float);
  request.tree = tree;
  return request;
}

// One input per rank, added from the left.
inline Request tree_sum(char* data, std::size_t count, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  std::vector<std::uint8_t> merges(n, 1);
  merges[0] = 0;
  return tree_sum(data, count, count, std::vector<std::uint16_t>(n, 1), std::move(merges));
}

// The read end of a closed pipe is readable, like the pidfd of a process that has ended.
inline void mark_dead(Engine& engine, int rank) {
  int ends[2];
  CHECK(::pipe(ends) == 0);
  ::close(ends[1]);
  engine.watch(rank, std::make_shared<Process>(ends[0]));
}

// A page whose first access blocks a thread until `release`, to simulate an operation that takes long.
class Trap {
 public:
  static constexpr std::size_t kBytes = 4096;

  Trap() : Trap(::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    owns_ = true;
  }
  explicit Trap(void* page) {
    page_ = static_cast<char*>(page);
    ::mprotect(page_, kBytes, PROT_NONE);
    struct sigaction action {};
    action.sa_handler = [](int) { on_fault(); };
    sigemptyset(&action.sa_mask);
    ::sigaction(SIGSEGV, &action, &before_);
    caught_ = released_ = false;
    timed_out_ = false;
  }
  ~Trap() {
    ::sigaction(SIGSEGV, &before_, nullptr);
    if (owns_) ::munmap(page_, kBytes);
  }
  Trap(const Trap&) = delete;
  Trap& operator=(const Trap&) = delete;

  char* page() const { return page_; }
  void wait_until_caught() const {
    while (!caught_) yield_core();
  }
  void release() { released_ = true; }
  bool timed_out() const { return timed_out_; }

 private:
  static void on_fault() {
    caught_ = true;
    const auto until = now_ns() + 10 * kSecond;
    while (!released_ && now_ns() < until) yield_core();
    timed_out_ = !released_;
    ::mprotect(page_, kBytes, PROT_READ | PROT_WRITE);
  }

  static inline char* page_ = nullptr;
  static inline std::atomic<bool> caught_, released_, timed_out_;
  bool owns_ = false;
  struct sigaction before_ {};
};

inline void finish(Engine& engine, std::uint64_t ticket) {
  CHECK(engine.wait(ticket, 20 * kSecond).outcome == Outcome::finished);
}

inline void barrier(Engine& engine) {
  finish(engine, engine.issue(in_place(Collective::barrier, nullptr, 0)));
}
