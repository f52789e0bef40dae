// Ranks that leave and rejoin, with threads as ranks.

#include <unistd.h>

#include "harness.hpp"

namespace {

using RejoinStage = Engine::RejoinStage;
using RejoinStatus = Engine::RejoinStatus;

// Rejoins up to a stage, or until there is a result.
RejoinStatus rejoin(Engine& engine, std::uint64_t calls = 0, RejoinStage to = RejoinStage::entered) {
  const std::uint64_t until = now_ns() + 20 * kSecond;
  RejoinStatus status;
  do status = engine.rejoin(calls, kSecond);
  while (status.result.outcome == Outcome::pending && status.stage != to && now_ns() < until);
  return status;
}

void leave_and_rejoin(Engine& engine) {
  CHECK(engine.leave());
  CHECK(rejoin(engine).stage == RejoinStage::entered);
}

int sum(Engine& engine, Buffer& buffer, int mine) {
  buffer.fill(mine);
  finish(engine, engine.issue(in_place(Collective::allreduce, buffer)));
  CHECK(buffer.holds(buffer[0]));
  return buffer[0];
}

// All data paths in one round, so that the numbers of windows differ between ranks too.
struct Buffers {
  explicit Buffers(Engine& engine)
      : small(engine, 10, false), ordinary(engine, 300, false), shared(engine, 200, true) {}
  Buffer& operator[](int i) { return i % 3 == 0 ? small : i % 3 == 1 ? ordinary : shared; }
  Buffer small, ordinary, shared;
};

// Ranks take different numbers of steps in each round; the others continue without those that left.
void test_uneven_rounds(int ranks) {
  const auto steps = [](int round, int rank) { return (round * 7 + rank * 5 + 3) % 11; };
  run(ranks, [&](Engine& engine, int rank) {
    Buffers buffers(engine);
    std::uint64_t calls = 0;
    for (int round = 0; round < 25; ++round) {
      std::uint64_t most = 0;
      for (int r = 0; r < ranks; ++r)
        most = std::max(most, static_cast<std::uint64_t>(steps(round, r)));
      for (int step = 0; step < steps(round, rank); ++step) {
        int expected = 0;
        for (int r = 0; r < ranks; ++r) expected += steps(round, r) > step ? r + 1 : 0;
        CHECK(sum(engine, buffers[round + step], rank + 1) == expected);
      }
      CHECK(engine.leave());
      const RejoinStatus status =
          rejoin(engine, calls + static_cast<std::uint64_t>(steps(round, rank)));
      CHECK(status.stage == RejoinStage::entered);
      CHECK(status.calls == calls + most);
      CHECK(engine.members().size() <= static_cast<std::size_t>(ranks));
      calls = status.calls;
    }
    barrier(engine);
    CHECK(engine.members().size() == static_cast<std::size_t>(ranks));
  });
}

// A fast rank may be a round ahead of a slow one.
void test_rejoin_without_operations(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 10, false);
    for (int round = 0; round < 200; ++round) leave_and_rejoin(engine);
    CHECK(sum(engine, buffer, rank) == ranks * (ranks - 1) / 2);
  });
}

// Rank 2 dies at each stage. The others report its death if they need it, and can rejoin once they have
// excluded it.
void test_death(RejoinStage reached) {
  std::atomic<bool> dead{false};
  run(3, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 200, true);
    sum(engine, buffer, 1);
    if (rank == 2) CHECK(sum(engine, buffer, 3) >= 3);  // one more than the others, which leave
    CHECK(engine.leave());
    if (rank == 2) {
      if (reached != RejoinStage::outside) rejoin(engine, 100, reached);
      dead = true;
      return;
    }
    while (!dead) {
      if (reached == RejoinStage::entering) engine.rejoin(5, kSecond / 100);
      yield_core();
    }
    mark_dead(engine, 2);
    const bool entered = reached == RejoinStage::entering;
    if (entered || rank == 1) {
      const RejoinStatus status = rejoin(engine, 5);
      CHECK(status.result.outcome == (entered ? Outcome::pending : Outcome::dead));
      if (!entered) CHECK(status.result.first == 2);
      if (!entered) CHECK((engine.missing_in_rejoin().back() == 2));
    }
    if (entered) {
      buffer.fill(1);
      const auto ticket = engine.issue(in_place(Collective::allreduce, buffer));
      const auto result = engine.wait(ticket, 20 * kSecond);
      CHECK(result.outcome == Outcome::dead && result.first == 2);
      engine.exclude(2);
      finish(engine, ticket);
      CHECK(buffer.holds(2));
    }
    engine.abort();  // as the group does after a death
    engine.exclude(2);
    if (!entered) {
      const RejoinStatus status = rejoin(engine, 5);
      CHECK(status.stage == RejoinStage::entered);
      CHECK(status.calls == (reached == RejoinStage::outside ? 5 : 100));
    }
    CHECK(sum(engine, buffer, 1) == 2);
    for (int round = 0; round < 5; ++round) leave_and_rejoin(engine);
    CHECK(sum(engine, buffer, 1) == 2);
    CHECK((engine.members() == std::vector<int>{0, 1}));
  });
}

// A timeout names the missing ranks, and the rank can wait again.
void test_timeout() {
  std::atomic<bool> waited{false};
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 10, false);
    if (rank == 1) {
      while (!waited) yield_core();
      CHECK(sum(engine, buffer, 7) == 7);
      leave_and_rejoin(engine);
    } else {
      CHECK(engine.leave());
      CHECK(engine.rejoin(0, kSecond).stage == RejoinStage::waiting);
      const RejoinStatus status = engine.rejoin(0, kSecond / 50);
      CHECK(status.result.outcome == Outcome::pending && status.stage == RejoinStage::waiting);
      CHECK((engine.missing_in_rejoin() == std::vector<int>{1}));
      waited = true;
      CHECK(rejoin(engine).stage == RejoinStage::entered);
    }
    CHECK(sum(engine, buffer, 1) == 2);
  });
}

void test_abort() {
  run(2, [](Engine& engine, int rank) {
    if (rank == 1) return;
    CHECK(engine.leave());
    std::thread other([&] {
      const auto started = now_ns();
      CHECK(rejoin(engine).result.outcome == Outcome::aborted);
      CHECK(now_ns() - started < 10 * kSecond);
    });
    engine.abort();
    other.join();
  });
}

// A cancelled receive does not take a later message.
void test_cancelled_transfers() {
  run(2, [](Engine& engine, int rank) {
    Buffer lost(engine, 1, false), got(engine, 1, false), sent(engine, 1, false);
    const int other = 1 - rank;
    const auto ticket = engine.receive(other, 3, lost.bytes(), lost.size());
    CHECK(engine.cancel_transfer(ticket));
    CHECK(!engine.cancel_transfer(ticket));
    CHECK(engine.wait_transfer(ticket, 20 * kSecond).state == Transfers::State::cancelled);
    leave_and_rejoin(engine);
    sent.fill(rank);
    engine.send(other, 3, sent.bytes(), sent.size());
    const auto received = engine.receive(other, 3, got.bytes(), got.size());
    CHECK(engine.wait_transfer(received, 20 * kSecond).state == Transfers::State::finished);
    CHECK(got.holds(other) && lost.holds(0));
  });
}

}  // namespace

int main() {
  for (const DriverMode by : {DriverMode::callers, DriverMode::threads, DriverMode::mixed}) {
    driver_mode = by;
    for (const int ranks : {1, 2, 3, 5}) {
      test_uneven_rounds(ranks);
      test_rejoin_without_operations(ranks);
    }
    for (const RejoinStage reached :
         {RejoinStage::outside, RejoinStage::waiting, RejoinStage::entering})
      test_death(reached);
    test_timeout();
    test_abort();
    test_cancelled_transfers();
  }
  return report();
}
