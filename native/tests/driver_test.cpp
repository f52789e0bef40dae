// The driver thread: it makes progress on its own and does not delay callers.

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

#include "harness.hpp"

namespace {

Result poll_until_ended(Engine& engine, std::uint64_t ticket) {
  const auto until = now_ns() + 20 * kSecond;
  Result result;
  while (result.outcome == Outcome::pending && now_ns() < until) {
    yield_core();
    result = engine.test(ticket);  // makes no progress itself
  }
  return result;
}

// Rank 0 does not wait; rank 1 depends on its progress.
void test_progress_in_background() {
  for (const bool shared : {false, true})
    for (const std::size_t count : {1u, 1000u}) {
      std::atomic<bool> done{false};
      run(2, [&](Engine& engine, int rank) {
        Buffer one(engine, count, shared), two(engine, count, shared, 8192);
        one.fill(rank + 1);
        two.fill(rank + 10);
        engine.issue(in_place(Collective::allreduce, one));
        const auto last = engine.issue(in_place(Collective::allreduce, two));
        if (rank == 0) {
          while (!done) yield_core();
          CHECK(poll_until_ended(engine, last).outcome == Outcome::finished);
        } else {
          finish(engine, last);
          done = true;
        }
        CHECK(one.holds(3) && two.holds(21));
      });
    }
}

void test_issue_does_not_wait_for_running_operation() {
  Trap trap;
  run(2, [&](Engine& engine, int rank) {
    Buffer small(engine, 4, false), large(engine, Trap::kBytes / sizeof(int), false);
    small.fill(1);
    char* const data = rank == 0 ? trap.page() : large.bytes();
    const auto first = engine.issue(in_place(Collective::allreduce, data, Trap::kBytes));
    if (rank == 0) {
      trap.wait_until_caught();
      const auto second = engine.issue(in_place(Collective::allreduce, small));
      CHECK(engine.test(first).outcome == Outcome::pending);
      CHECK(engine.test(second).outcome == Outcome::pending);
      trap.release();
      CHECK(poll_until_ended(engine, second).outcome == Outcome::finished);
      CHECK(!trap.timed_out());
    } else {
      finish(engine, engine.issue(in_place(Collective::allreduce, small)));
    }
    CHECK(engine.test(first).outcome == Outcome::finished);
    CHECK(small.holds(2));
  });
}

void test_wait_returns_during_next_operation() {
  Trap trap;
  run(2, [&](Engine& engine, int rank) {
    Buffer small(engine, 4, false), large(engine, Trap::kBytes / sizeof(int), false);
    small.fill(1);
    const auto first = engine.issue(in_place(Collective::allreduce, small));
    CHECK(poll_until_ended(engine, first).outcome == Outcome::finished);
    char* const data = rank == 0 ? trap.page() : large.bytes();
    const auto second = engine.issue(in_place(Collective::allreduce, data, Trap::kBytes));
    if (rank == 0) {
      trap.wait_until_caught();
      finish(engine, first);
      CHECK(!trap.timed_out());
      trap.release();
    }
    finish(engine, second);
  });
}

void test_several_waiting_threads() {
  run(3, [&](Engine& engine, int) {
    constexpr std::size_t kCalls = 200;
    std::vector<Buffer> buffers;
    for (std::size_t call = 0; call < kCalls; ++call) {
      buffers.emplace_back(engine, call % 60, call % 2 == 0, call * 256);
      buffers.back().fill(static_cast<int>(call));
    }
    std::atomic<std::uint64_t> last{0};
    const auto wait = [&](std::uint64_t every) {
      for (std::uint64_t ticket = every; ticket <= kCalls; ticket += every) {
        while (last < ticket) yield_core();
        finish(engine, ticket);
      }
    };
    std::thread others[] = {std::thread(wait, 1), std::thread(wait, 7), std::thread(wait, 50)};
    for (Buffer& buffer : buffers) last = engine.issue(in_place(Collective::allreduce, buffer));
    for (auto& other : others) other.join();
    bool right = true;
    for (std::size_t call = 0; call < kCalls; ++call)
      right = right && buffers[call].holds(3 * static_cast<int>(call));
    CHECK(right);
    barrier(engine);
  });
}

void test_transfers_in_background() {
  std::atomic<bool> received{false};
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 1000, false);  // many times the size of a channel
    buffer.fill(rank + 1);
    Buffer sum(engine, 500, true);
    sum.fill(1);
    if (rank == 0) {
      engine.send(1, 0, buffer.bytes(), buffer.size());
      const auto ticket = engine.issue(in_place(Collective::allreduce, sum));
      while (!received) yield_core();
      CHECK(poll_until_ended(engine, ticket).outcome == Outcome::finished);
    } else {
      const auto ticket = engine.receive(0, 0, buffer.bytes(), buffer.size());
      CHECK(engine.wait_transfer(ticket, 20 * kSecond).state == Transfers::State::finished);
      CHECK(buffer.holds(1));
      received = true;
      finish(engine, engine.issue(in_place(Collective::allreduce, sum)));
    }
    CHECK(sum.holds(2));
  });
}

pid_t start_idle_process() {
  const pid_t pid = ::fork();
  if (pid == 0)
    while (true) ::pause();
  return pid;
}

void test_death_is_detected_without_waits() {
  const pid_t peer = start_idle_process();
  std::atomic<int> seen{0};
  run(3, [&](Engine& engine, int rank) {
    if (rank == 2) return;  // plays the dead rank
    engine.watch(2, std::make_shared<Process>(
                        static_cast<int>(::syscall(SYS_pidfd_open, peer, 0))));
    Buffer buffer(engine, 100, rank == 0);
    buffer.fill(1);
    const auto ticket = engine.issue(in_place(Collective::allreduce, buffer));
    CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
    if (++seen == 2) ::kill(peer, SIGKILL);
    const Result result = poll_until_ended(engine, ticket);
    CHECK(result.outcome == Outcome::dead && result.first == 2);
    engine.exclude(2);  // the driver continues without it
    CHECK(poll_until_ended(engine, ticket).outcome == Outcome::finished);
    CHECK(buffer.holds(2));
    finish(engine, engine.issue(in_place(Collective::allreduce, buffer)));
  });
  ::waitpid(peer, nullptr, 0);
}

void test_abort_stops_driver() {
  run(2, [](Engine& engine, int rank) {
    if (rank == 1) return;
    auto buffer = std::make_unique<Buffer>(engine, 100u, false);
    const auto ticket = engine.issue(in_place(Collective::allreduce, *buffer));
    engine.abort();
    buffer.reset();  // AddressSanitizer would report an access
    CHECK(engine.test(ticket).outcome == Outcome::aborted);
    const auto refused = engine.issue(in_place(Collective::barrier, nullptr, 0));
    CHECK(engine.wait(refused, kSecond).outcome == Outcome::aborted);
  });
}

// The destructor returns promptly while the driver is idle, blocked on a peer, or busy.
void test_destroy_engine_at_any_time() {
  const auto started = now_ns();
  for (int turn = 0; turn < 30; ++turn) {
    Region region = Region::create("memfd", 2, tiny());
    std::vector<std::vector<int>> memory(2, std::vector<int>(1000, 1));  // outlives the engine
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank)
      threads.emplace_back([&, rank] {
        Engine engine(region.alias(), rank, 2);
        engine.start_driver();
        auto* const data = reinterpret_cast<char*>(memory[static_cast<std::size_t>(rank)].data());
        const int calls = turn % 3 == 0 ? 0 : turn % 3 == 1 && rank == 1 ? 0 : 30;
        for (int call = 0; call < calls; ++call)
          engine.issue(in_place(Collective::allreduce, data, 4000));
        if (turn % 2 == 0) ::usleep(static_cast<useconds_t>(turn * 20));
      });
    for (auto& thread : threads) thread.join();
  }
  CHECK(now_ns() - started < 20 * kSecond);
}

void test_callers_continue_after_stop() {
  run(2, [](Engine& engine, int rank) {
    Buffer before(engine, 300, false), after(engine, 300, true);
    before.fill(rank);
    after.fill(rank);
    const auto first = engine.issue(in_place(Collective::allreduce, before));
    engine.stop_driver();
    engine.stop_driver();
    CHECK(!engine.has_driver());
    finish(engine, first);
    finish(engine, engine.issue(in_place(Collective::allreduce, after)));
    CHECK(before.holds(1) && after.holds(1));
  });
}

// A forked child has a copy of the engine without a thread; destroying it must not hang.
void test_destroy_in_forked_child() {
  Region region = Region::create("memfd", 2, tiny());
  auto engine = std::make_unique<Engine>(region.alias(), 0, 2);
  engine->start_driver();
  Trap trap;  // the child's copy of the lock stays locked
  Engine peer(region.alias(), 1, 2);
  Buffer theirs(peer, Trap::kBytes / sizeof(int), false);
  const auto ticket = engine->issue(in_place(Collective::allreduce, trap.page(), Trap::kBytes));
  const auto other = peer.issue(in_place(Collective::allreduce, theirs));
  trap.wait_until_caught();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    engine->stop_driver();
    engine.reset();
    ::_exit(7);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  trap.release();
  finish(peer, other);
  CHECK(poll_until_ended(*engine, ticket).outcome == Outcome::finished);
}

void test_idle_driver_sleeps() {
  run(3, [](Engine& engine, int) {
    Buffer buffer(engine, 100, false);
    finish(engine, engine.issue(in_place(Collective::allreduce, buffer)));
  });
  Region region = Region::create("memfd", 1, tiny());
  std::vector<std::unique_ptr<Engine>> engines;
  for (int i = 0; i < 8; ++i) {
    engines.push_back(std::make_unique<Engine>(region.alias(), 0, 2));
    engines.back()->start_driver();
  }
  ::usleep(20'000);
  timespec before{}, after{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  ::usleep(200'000);
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const double spent = static_cast<double>(after.tv_sec - before.tv_sec) +
                       static_cast<double>(after.tv_nsec - before.tv_nsec) / 1e9;
  CHECK(spent < 0.05);
}

}  // namespace

int main() {
  driver_mode = DriverMode::threads;
  test_progress_in_background();
  test_issue_does_not_wait_for_running_operation();
  test_wait_returns_during_next_operation();
  test_several_waiting_threads();
  test_transfers_in_background();
  test_death_is_detected_without_waits();
  test_abort_stops_driver();
  test_destroy_engine_at_any_time();
  test_callers_continue_after_stop();
  test_destroy_in_forked_child();
  test_idle_driver_sleeps();
  return report();
}
