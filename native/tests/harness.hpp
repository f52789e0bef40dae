// What the engine's tests share: threads for ranks, and sizes so small that each test goes around
// the rings and through many windows.

#pragma once

#include <atomic>
#include <cstdio>
#include <functional>
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

inline int tell() {
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
  sizes.streamed = 4096;
  sizes.slab = 1 << 20;
  return sizes;
}

// Who does the ranks' shares; `by_both` gives a thread to the odd ones.
enum class Driven { by_callers, by_threads, by_both };
inline Driven driven = Driven::by_callers;

using Body = std::function<void(Engine&, int)>;

inline void run(int ranks, const Body& body) {
  Region region = Region::create("memfd", ranks, tiny());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Engine engine(region.alias(), rank, 2);
      if (driven == Driven::by_threads || (driven == Driven::by_both && rank % 2 == 1))
        engine.start_driver();
      body(engine, rank);
    });
  for (auto& thread : threads) thread.join();
}

// Memory for one rank's tensor: ordinary, or in the region.
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
  bool holds(int value) const {
    for (std::size_t i = 0; i < count_; ++i)
      if (data_[i] != value) return false;
    return true;
  }

 private:
  std::vector<int> own_;
  std::size_t count_;
  int* data_;
};

inline Request in_place(Kind kind, char* data, std::size_t bytes, int root = 0) {
  Request request;
  request.kind = kind;
  request.reduction = {DType::int32, ReduceOp::sum, 1.0};
  request.root = root;
  request.input = data;
  request.bytes = request.output_bytes = request.extent = bytes;
  request.outputs = {data};
  return request;
}

inline Request in_place(Kind kind, Buffer& buffer, int root = 0) {
  return in_place(kind, buffer.bytes(), buffer.size(), root);
}

inline void finish(Engine& engine, std::uint64_t ticket) {
  CHECK(engine.wait(ticket, 20 * kSecond).outcome == Outcome::finished);
}
