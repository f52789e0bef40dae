// Each allocation of the engine fails in turn. The call throws without having changed anything, so that
// it succeeds when it is repeated; buffering an unexpected message is retried by the engine. No memory,
// descriptor or file leaks.

#include <dirent.h>
#include <stdlib.h>

#include <bit>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "harness.hpp"

namespace {

std::atomic<long> live{0};                    // allocations not freed
std::atomic<bool> armed{false};               // whether allocations may fail
std::atomic<long> left{0};                    // allocations until one fails
std::atomic<std::size_t> largest{SIZE_MAX};   // allocations of this size always fail
std::atomic<long> refusals{0};

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (armed && (bytes >= largest || --left == 0)) {
    ++refusals;
    throw std::bad_alloc();
  }
  void* const memory = alignment == 0 ? std::malloc(bytes) : std::aligned_alloc(
      alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  ++live;
  return memory;
}

void release(void* memory) {
  if (memory == nullptr) return;
  --live;
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, 0); }
void* operator new[](std::size_t bytes) { return allocate(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t to) {
  return allocate(bytes, static_cast<std::size_t>(to));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace {

class Armed {
 public:
  Armed() { armed = true; }
  ~Armed() { armed = false; }
};

// Repeats a call that throws bad_alloc.
template <class Call>
auto attempt(Call&& call) {
  for (int turn = 0; turn < 2; ++turn) {
    try {
      const Armed now;
      return call();
    } catch (const std::bad_alloc&) {
    }
  }
  CHECK(!"failed twice");
  std::abort();
}

long entries(const char* folder) {
  long count = 0;
  DIR* const handle = ::opendir(folder);
  while (::readdir(handle) != nullptr) ++count;
  ::closedir(handle);
  return count;
}

std::string folder() {
  static const std::string made = [] {
    char name[] = "/tmp/phalanx-test-XXXXXX";
    return std::string(::mkdtemp(name));
  }();
  return made;
}

// -- scenarios --------------------------------------------------------------------------------------

// Three ranks on one thread.
class Ranks {
 public:
  static constexpr int kSize = 3;

  Ranks() {
    region_ = attempt([] { return std::make_unique<Region>(Region::create("memfd", kSize, tiny())); });
    for (int rank = 0; rank < kSize; ++rank)
      engines_[rank] =
          attempt([&] { return std::make_unique<Engine>(region_->alias(), rank, 2); });
  }

  Engine& operator[](int rank) { return *engines_[rank]; }
  const Region& region() const { return *region_; }

  std::uint64_t issue(int rank, const Request& request) {
    return attempt([&] { return engines_[rank]->issue(Request(request)); });
  }

  // Makes progress on all ranks.
  Result result(int rank, std::uint64_t ticket) {
    for (int turn = 0; turn < 60; ++turn)
      for (const auto& engine : engines_) attempt([&] { return engine->test(ticket).outcome; });
    return engines_[rank]->test(ticket);
  }

  void progress() {
    for (int turn = 0; turn < 60; ++turn)
      for (const auto& engine : engines_) attempt([&] { return engine->test_transfer(1).state; });
  }

 private:
  std::unique_ptr<Region> region_;
  std::unique_ptr<Engine> engines_[kSize];
};

void create_regions() {
  for (const std::string& where : {std::string("memfd"), folder()}) {
    const auto made =
        attempt([&] { return std::make_unique<Region>(Region::create(where, 2, tiny())); });
    const auto same = attempt([&] {
      return std::make_unique<Region>(Region::open(made->path(), made->token(), 2, tiny()));
    });
    CHECK(same->token() == made->token());
    bool refused = false;
    try {
      attempt([&] { return Region::open(made->path(), made->token() + 2, 2, tiny()).token(); });
    } catch (const std::runtime_error&) {
      refused = true;
    }
    CHECK(refused);
    made->unlink();
  }
}

void run_collectives() {
  Ranks ranks;
  std::uint64_t ticket = 0;
  for (const bool shared : {false, true})
    for (const std::size_t count : {3u, 300u}) {
      std::vector<Buffer> inputs;
      std::vector<std::vector<int>> outputs(Ranks::kSize);
      for (int rank = 0; rank < Ranks::kSize; ++rank) {
        inputs.emplace_back(ranks[rank], count, shared);
        inputs.back().fill(rank + 1);
        outputs[static_cast<std::size_t>(rank)].resize(count * Ranks::kSize);
      }
      for (const Collective kind : {Collective::barrier, Collective::allreduce,
                                    Collective::broadcast, Collective::allgather}) {
        for (int rank = 0; rank < Ranks::kSize; ++rank) {
          const auto i = static_cast<std::size_t>(rank);
          Request request = in_place(kind, inputs[i], 1);
          if (kind == Collective::allgather) {
            request.outputs.clear();
            for (std::size_t r = 0; r < Ranks::kSize; ++r)
              request.outputs.push_back(reinterpret_cast<char*>(outputs[i].data() + r * count));
          }
          const std::uint64_t issued = rank == 2 ? attempt([&] {
            return ranks[rank].try_issue(Request(request)).ticket;
          }) : ranks.issue(rank, request);
          if (rank == 0) ++ticket;
          CHECK(issued == ticket);
        }
        for (int rank = 0; rank < Ranks::kSize; ++rank)
          CHECK(ranks.result(rank, ticket).outcome == Outcome::finished);
      }
      for (std::size_t i = 0; i < Ranks::kSize; ++i)
        CHECK(inputs[i].holds(6) && outputs[i] == std::vector<int>(count * Ranks::kSize, 6));
    }
}

// Small and direct; the request is built again in each attempt.
void run_trees() {
  Ranks ranks;
  std::uint64_t ticket = 0;
  for (const std::size_t count : {5u, 300u}) {
    std::vector<Buffer> nodes;
    for (int rank = 0; rank < Ranks::kSize; ++rank) {
      nodes.emplace_back(ranks[rank], 3 * count, true);
      nodes.back().fill_floats(static_cast<float>(rank + 1));
    }
    ++ticket;
    for (int rank = 0; rank < Ranks::kSize; ++rank) {
      char* const data = nodes[static_cast<std::size_t>(rank)].bytes();
      const std::uint64_t issued = attempt([&] {
        return ranks[rank].issue(tree_sum(data, count, count, {2, 1, 1}, {0, 1, 0, 2}, 2.0));
      });
      CHECK(issued == ticket);
    }
    for (int rank = 0; rank < Ranks::kSize; ++rank)
      CHECK(ranks.result(rank, ticket).outcome == Outcome::finished);
    for (Buffer& each : nodes)
      CHECK(each[0] == std::bit_cast<int>(3.5f) && each[count - 1] == each[0]);
  }
}

// Failed operations, and many in flight.
void exclude_and_leave() {
  Ranks ranks;
  std::vector<Buffer> buffers;
  for (int rank = 0; rank < Ranks::kSize; ++rank) buffers.emplace_back(ranks[rank], 300u, true);
  for (std::size_t rank = 0; rank < 3; ++rank)
    ranks.issue(static_cast<int>(rank), in_place(Collective::allreduce, buffers[rank]));
  for (int rank = 0; rank < 3; ++rank) CHECK(ranks.result(rank, 1).outcome == Outcome::finished);
  CHECK(attempt([&] { return ranks[1].leave(); }));
  std::uint64_t last = 0;
  for (const int rank : {0, 2})
    for (int call = 0; call < 40; ++call)
      last = ranks.issue(
          rank, in_place(Collective::broadcast, buffers[static_cast<std::size_t>(rank)], call % 2));
  for (const int rank : {0, 2}) {
    CHECK(ranks.result(rank, last).outcome == Outcome::root_left);
    CHECK(ranks.result(rank, last - 1).outcome == Outcome::finished);
    CHECK(attempt([&] { return ranks[rank].members(); }).size() == 2);
  }
  for (const int rank : {0, 2}) CHECK(attempt([&] { return ranks[rank].leave(); }));
  for (int turn = 0; turn < 3; ++turn)
    for (int rank = 0; rank < 3; ++rank) attempt([&] { return ranks[rank].rejoin(0, 1).stage; });
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(attempt([&] { return ranks[rank].rejoin(0, 1).stage; }) == Engine::RejoinStage::entered);
    CHECK(attempt([&] { return ranks[rank].missing_in_rejoin(); }).empty());
    buffers[static_cast<std::size_t>(rank)].fill(1);
  }
  for (const std::size_t rank : {2u, 0u, 1u})
    last = ranks.issue(static_cast<int>(rank), in_place(Collective::allreduce, buffers[rank]));
  for (const int rank : {0, 1}) {
    mark_dead(ranks[rank], 2);
    CHECK((attempt([&] { return ranks[rank].dead_ranks(); }) == std::vector<int>{2}));
    attempt([&] { return ranks[rank].abort(), 0; });
    attempt([&] { return ranks[rank].exclude(2), 0; });
  }
  for (int turn = 0; turn < 9; ++turn)
    for (const int rank : {0, 1}) attempt([&] { return ranks[rank].test(last).outcome; });
  for (const int rank : {0, 1}) CHECK(ranks[rank].test(last).outcome == Outcome::torn);
}

// Unexpected messages.
void send_and_receive() {
  Ranks ranks;
  const auto bytes = [](std::vector<int>& of) { return reinterpret_cast<char*>(of.data()); };
  std::vector<int> one(100, 1), two(7, 2), three(500, 3), none;
  std::vector<int> got_one(100), got_two(7), got_three(500), too_small(3);
  const auto send = [&](std::int64_t tag, std::vector<int>& from) {
    attempt([&] { return ranks[0].send(1, tag, bytes(from), from.size() * sizeof(int)); });
  };
  const auto receive = [&](std::int64_t tag, std::vector<int>& into, int from = 0) {
    return attempt(
        [&] { return ranks[1].receive(from, tag, bytes(into), into.size() * sizeof(int)); });
  };
  const auto state = [&](std::uint64_t ticket) {
    Transfers::State now{};
    for (int turn = 0; turn < 3; ++turn) {
      ranks.progress();
      now = attempt([&] { return ranks[1].wait_transfer(ticket, 1).state; });
    }
    return now;
  };
  using State = Transfers::State;
  send(1, one);
  send(2, two);
  send(3, three);
  send(4, none);
  const auto second = receive(2, got_two);
  const auto wrong = receive(3, too_small);
  CHECK(state(second) == State::finished && got_two == two);
  CHECK(state(wrong) == State::wrong_size);
  const auto third = receive(3, got_three, -1);
  CHECK(state(third) == State::finished && got_three == three);
  CHECK(state(receive(1, got_one)) == State::finished && got_one == one);
  CHECK(state(receive(4, none)) == State::finished);
  const auto never = receive(5, got_one);
  CHECK(attempt([&] { return ranks[1].cancel_transfer(never); }));
  for (const auto ticket : {second, wrong, third, never}) ranks[1].detach_transfer(ticket);
  CHECK(attempt([&] { return ranks[1].transfers_kept(); }) == 2);
}

// The number of allocations depends on the scheduling of the drivers.
void run_with_drivers() {
  Ranks ranks;
  std::vector<Buffer> buffers;
  for (int rank = 0; rank < Ranks::kSize; ++rank) {
    attempt([&] { return ranks[rank].start_driver(), 0; });
    buffers.emplace_back(ranks[rank], 50u, rank == 0);
    buffers.back().fill(1);
  }
  std::vector<int> sent(300, 4), got(300);
  const auto data = [](std::vector<int>& of) { return reinterpret_cast<char*>(of.data()); };
  attempt([&] { return ranks[0].send(1, 1, data(sent), 1200); });
  std::uint64_t last = 0;
  for (int call = 0; call < 5; ++call)
    for (std::size_t rank = 0; rank < 3; ++rank)
      last = ranks.issue(static_cast<int>(rank), in_place(Collective::allreduce, buffers[rank]));
  CHECK(last == 5);
  const Armed now;
  for (int rank = 0; rank < 3; ++rank) finish(ranks[rank], last);
  for (Buffer& buffer : buffers) CHECK(buffer.holds(243));
  const auto ticket = attempt([&] { return ranks[1].receive(0, 1, data(got), 1200); });
  Transfers::State state{};
  for (int turn = 0; turn < 100 && state != Transfers::State::finished; ++turn)
    state = ranks[1].wait_transfer(ticket, kSecond).state;
  CHECK(state == Transfers::State::finished && got == sent);
}

// -- failures ---------------------------------------------------------------------------------------

void fail_each_allocation(void (*scene)(), const char* name) {
  scene();  // for allocations that happen only once
  long number = 0;
  int without = 0;  // runs in which no allocation failed
  while (without < 3) {
    const long memory = live, descriptors = entries("/proc/self/fd");
    const long names = entries(folder().c_str());
    const long before = failed, refused = refusals;
    left = ++number;
    scene();
    without = refusals == refused ? without + 1 : 0;
    left = 0;
    CHECK(live == memory);
    CHECK(entries("/proc/self/fd") == descriptors);
    CHECK(entries(folder().c_str()) == names);
    if (failed != before) std::printf("  with failed allocation %ld of %s\n", number, name);
  }
  CHECK(number > 8);
}

// There is no memory to buffer a large message. A receive behind it is starved, collectives continue, and
// a receive of the message itself succeeds.
void test_starved_receive() {
  run(2, [](Engine& engine, int rank) {
    using State = Transfers::State;
    std::vector<int> large(5000, 7), small(3, 8);
    const auto data = [](std::vector<int>& of) { return reinterpret_cast<char*>(of.data()); };
    std::vector<int> got_large(5000), got_small(3);
    Buffer sum(engine, 10, false);
    sum.fill(1);
    barrier(engine);  // all ranks have allocated
    if (rank == 0) {
      const auto first = engine.send(1, 1, data(large), 20'000);
      const auto second = engine.send(1, 2, data(small), 12);
      finish(engine, engine.issue(in_place(Collective::allreduce, sum)));
      CHECK(engine.wait_transfer(first, 20 * kSecond).state == State::finished);
      CHECK(engine.wait_transfer(second, 20 * kSecond).state == State::finished);
      return;
    }
    largest = 20'000;
    armed = true;
    const auto second = engine.receive(0, 2, data(got_small), 12);
    const auto status = engine.wait_transfer(second, 20 * kSecond);
    CHECK(status.state == State::starved && status.peer == 0 && status.bytes == 20'000);
    CHECK(engine.test_transfer(second).state == State::pending);
    finish(engine, engine.issue(in_place(Collective::allreduce, sum)));
    CHECK(sum.holds(2));
    const auto first = engine.receive(0, 1, data(got_large), 20'000);
    CHECK(engine.wait_transfer(first, 20 * kSecond).state == State::finished);
    CHECK(engine.wait_transfer(second, 20 * kSecond).state == State::finished);
    armed = false;
    largest = SIZE_MAX;
    CHECK(got_large == large && got_small == small);
  });
}

}  // namespace

int main() {
  fail_each_allocation(create_regions, "create_regions");
  fail_each_allocation(run_collectives, "run_collectives");
  fail_each_allocation(run_trees, "run_trees");
  fail_each_allocation(exclude_and_leave, "exclude_and_leave");
  fail_each_allocation(send_and_receive, "send_and_receive");
  fail_each_allocation(run_with_drivers, "run_with_drivers");
  for (const DriverMode by : {DriverMode::callers, DriverMode::threads}) {
    driver_mode = by;
    test_starved_receive();
  }
  ::rmdir(folder().c_str());
  return report();
}
