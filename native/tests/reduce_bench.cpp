// How fast the arithmetic is, with memcpy as the yardstick.
//
//   reduce_bench [seconds per figure [KiB per buffer]]
//
// Buffers are shared mappings, as in the engine; the memcpy is private and on one thread, which is
// what a tensor copy costs. A figure is the least of many runs: other work on the machine only
// ever adds. "x memcpy" is the time in units of the memcpy of one buffer: an all-reduce of two
// ranks at 0.5 takes half as long as copying the gradients once.

#include "reduce.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "reduce_dispatch.hpp"

namespace {

using namespace phalanx;
using Clock = std::chrono::steady_clock;

double budget = 0.15;  // seconds per figure

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Mapping {
 public:
  Mapping(std::size_t bytes, int visibility) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, visibility | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) std::abort();
    std::memset(data_, 0, bytes);  // touch every page; zeros stay zeros, however often averaged
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, bytes_); }
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_;
  std::size_t bytes_;
};

// The least time of `run` with small ones repeated so that the clock does not matter.
double least_time(std::size_t bytes, const std::function<void()>& run) {
  const std::size_t repeats = std::max<std::size_t>(1, (std::size_t{1} << 20) / bytes);
  double least = 1e9;
  const auto begin = Clock::now();
  for (int rounds = 0; rounds < 3 || seconds_since(begin) < budget; ++rounds) {
    const auto start = Clock::now();
    for (std::size_t i = 0; i < repeats; ++i) run();
    least = std::min(least, seconds_since(start) / static_cast<double>(repeats));
  }
  return least;
}

// Two threads that start each run together: this one and one that lives as long as the object.
class Pair {
 public:
  // work(0) and work(1) at the same time; returns when both are done.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    const int turn = turn_.load(std::memory_order_relaxed) + 1;
    turn_.store(turn, std::memory_order_release);
    work(0);
    wait_for(done_, turn);
  }
  ~Pair() {
    work_ = nullptr;
    turn_.fetch_add(1, std::memory_order_release);
    other_.join();
  }

 private:
  // Spins, because a wake-up costs more than a small reduction; not for ever, because another
  // program may have the other thread's core.
  static void wait_for(const std::atomic<int>& word, int value) {
    for (int spins = 0; word.load(std::memory_order_acquire) != value; ++spins) {
      if (spins > 20000) std::this_thread::yield();
    }
  }

  void serve() {
    for (int turn = 1;; ++turn) {
      wait_for(turn_, turn);
      if (work_ == nullptr) return;
      (*work_)(1);
      done_.store(turn, std::memory_order_release);
    }
  }

  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<int> turn_{0};
  alignas(64) std::atomic<int> done_{0};
  std::thread other_{[this] { serve(); }};
};

double time_memcpy(std::size_t bytes) {
  const Mapping from(bytes, MAP_PRIVATE);
  const Mapping to(bytes, MAP_PRIVATE);
  return least_time(bytes, [&] { std::memcpy(to.data(), from.data(), bytes); });
}

using Reducer = void (*)(std::vector<void*>& buffers, std::size_t count);

void into_first(std::vector<void*>& buffers, std::size_t count) {
  const std::vector<const void*> in(buffers.begin(), buffers.end());
  reduce({DType::float32, ReduceOp::avg}, in, buffers[0], count);
}

void into_all(std::vector<void*>& buffers, std::size_t count) {
  reduce_to_all({DType::float32, ReduceOp::avg}, buffers, count);
}

void reduce_share(Reducer reducer, char* memory, std::size_t ranks, std::size_t bytes, int share,
                  int shares) {
  const std::size_t mine = bytes / static_cast<std::size_t>(shares);
  std::vector<void*> buffers;
  for (std::size_t r = 0; r < ranks; ++r) {
    buffers.push_back(memory + r * bytes + static_cast<std::size_t>(share) * mine);
  }
  reducer(buffers, mine / sizeof(float));
}

double time_reduction(Reducer reducer, std::size_t ranks, std::size_t bytes, int threads) {
  const Mapping memory(ranks * bytes, MAP_SHARED);
  if (threads == 1) {
    return least_time(bytes, [&] { reduce_share(reducer, memory.data(), ranks, bytes, 0, 1); });
  }
  Pair pair;
  const std::function<void(int)> half = [&](int share) {
    reduce_share(reducer, memory.data(), ranks, bytes, share, 2);
  };
  return least_time(bytes, [&] { pair.run(half); });
}

void print_figure(const char* what, std::size_t ranks, int threads, std::size_t bytes,
                  double seconds, double yardstick) {
  std::printf("%-14s %zu buffers, %d thread%s %9.1f us %7.1f GB/s of result %6.2f x memcpy\n", what,
              ranks, threads, threads == 1 ? ": " : "s:", seconds * 1e6,
              static_cast<double>(bytes) / seconds / 1e9, seconds / yardstick);
}

void measure(std::size_t bytes) {
  const double yardstick = time_memcpy(bytes);
  std::printf("\n%zu KiB: memcpy %.1f us, %.1f GB/s\n", bytes >> 10, yardstick * 1e6,
              static_cast<double>(bytes) / yardstick / 1e9);
  for (std::size_t ranks : {2u, 4u}) {
    for (int threads : {1, 2}) {
      print_figure("reduce", ranks, threads, bytes,
                   time_reduction(into_first, ranks, bytes, threads), yardstick);
      print_figure("reduce_to_all", ranks, threads, bytes,
                   time_reduction(into_all, ranks, bytes, threads), yardstick);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) budget = std::atof(argv[1]);
  std::printf("float32 avg, %s\n", instruction_set());
  std::vector<std::size_t> sizes = {16, 256, 1024, 25 * 1024, 100 * 1024};  // KiB
  if (argc > 2) sizes = {std::strtoul(argv[2], nullptr, 10)};
  for (std::size_t kib : sizes) measure(kib << 10);
}
