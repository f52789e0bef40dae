// What the engine's tests share: threads for ranks, and sizes so small that each test goes around
// the rings and through many windows.

#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
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
  sizes.piece = 128;
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

// Reads as ended, like the pidfd of a process that has.
inline void take_for_dead(Engine& engine, int rank) {
  int ends[2];
  CHECK(::pipe(ends) == 0);
  ::close(ends[1]);
  engine.watch(rank, std::make_shared<Process>(ends[0]));
}

// A page at whose first touch a thread stops until it is let go: a share that takes long. Of its own
// memory, or laid where it is to be.
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
    action.sa_handler = [](int) { spring(); };
    sigemptyset(&action.sa_mask);
    ::sigaction(SIGSEGV, &action, &before_);
    caught_ = let_go_ = false;
    outlasted_ = false;
  }
  ~Trap() {
    ::sigaction(SIGSEGV, &before_, nullptr);
    if (owns_) ::munmap(page_, kBytes);
  }
  Trap(const Trap&) = delete;
  Trap& operator=(const Trap&) = delete;

  char* page() const { return page_; }
  void await() const {
    while (!caught_) yield_core();
  }
  void let_go() { let_go_ = true; }
  bool outlasted() const { return outlasted_; }  // nobody let go in time

 private:
  static void spring() {
    caught_ = true;
    const auto until = now_ns() + 10 * kSecond;
    while (!let_go_ && now_ns() < until) yield_core();
    outlasted_ = !let_go_;
    ::mprotect(page_, kBytes, PROT_READ | PROT_WRITE);
  }

  static inline char* page_ = nullptr;
  static inline std::atomic<bool> caught_, let_go_, outlasted_;
  bool owns_ = false;
  struct sigaction before_ {};
};

inline void finish(Engine& engine, std::uint64_t ticket) {
  CHECK(engine.wait(ticket, 20 * kSecond).outcome == Outcome::finished);
}
