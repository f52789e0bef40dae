// Ranks that leave and come back, with threads for ranks.

#include <unistd.h>

#include "harness.hpp"

namespace {

using Stage = Engine::Stage;
using Entry = Engine::Entry;

// Goes on with coming back up to a stage, or until there is a verdict.
Entry come_back(Engine& engine, std::uint64_t calls = 0, Stage to = Stage::entered) {
  const std::uint64_t until = now_ns() + 20 * kSecond;
  Entry entry;
  do entry = engine.rejoin(calls, kSecond);
  while (entry.verdict.outcome == Outcome::pending && entry.stage != to && now_ns() < until);
  return entry;
}

void leave_and_come_back(Engine& engine) {
  CHECK(engine.leave());
  CHECK(come_back(engine).stage == Stage::entered);
}

int sum(Engine& engine, Buffer& buffer, int mine) {
  buffer.fill(mine);
  finish(engine, engine.issue(in_place(Kind::allreduce, buffer)));
  CHECK(buffer.holds(buffer[0]));
  return buffer[0];
}

// Small, in windows and in place, all in one round, so that numbers of windows differ as well.
struct Buffers {
  explicit Buffers(Engine& engine)
      : small(engine, 10, false), ordinary(engine, 300, false), shared(engine, 200, true) {}
  Buffer& operator[](int i) { return i % 3 == 0 ? small : i % 3 == 1 ? ordinary : shared; }
  Buffer small, ordinary, shared;
};

// Every rank makes some steps in each round, and the others go on without who has run out.
void test_rounds(int ranks) {
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
      const Entry entry =
          come_back(engine, calls + static_cast<std::uint64_t>(steps(round, rank)));
      CHECK(entry.stage == Stage::entered);
      CHECK(entry.calls == calls + most);
      CHECK(engine.members().size() <= static_cast<std::size_t>(ranks));
      calls = entry.calls;
    }
    finish(engine, engine.issue(in_place(Kind::barrier, nullptr, 0)));
    CHECK(engine.members().size() == static_cast<std::size_t>(ranks));
  });
}

// With nothing in between, a fast rank is a round ahead of one that has yet to look.
void test_nothing_but_coming_back(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 10, false);
    for (int round = 0; round < 200; ++round) leave_and_come_back(engine);
    CHECK(sum(engine, buffer, rank) == ranks * (ranks - 1) / 2);
  });
}

// Rank 2 dies before or after it has said that it waits. Either way the others cannot enter, say so,
// and can when they go on without it, beyond all that it did; even one who had forgotten it before.
void test_death(Stage reached) {
  std::atomic<bool> dead{false};
  run(3, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 200, true);
    sum(engine, buffer, 1);
    if (rank == 2) CHECK(sum(engine, buffer, 3) >= 3);  // one more than the others, who leave
    CHECK(engine.leave());
    if (rank == 2) {
      if (reached != Stage::outside) come_back(engine, 100, reached);
      dead = true;
      return;
    }
    while (!dead) {
      if (reached == Stage::entering) engine.rejoin(5, kSecond / 100);
      yield_core();
    }
    take_for_dead(engine, 2);
    const bool entered = reached == Stage::entering;
    if (entered || rank == 1) {
      const Entry entry = come_back(engine, 5);
      CHECK(entry.verdict.outcome == (entered ? Outcome::pending : Outcome::dead));
      if (!entered) CHECK(entry.verdict.first == 2);
      if (!entered) CHECK((engine.awaited().back() == 2));
    }
    if (entered) {
      buffer.fill(1);
      const auto ticket = engine.issue(in_place(Kind::allreduce, buffer));
      const auto verdict = engine.wait(ticket, 20 * kSecond);
      CHECK(verdict.outcome == Outcome::dead && verdict.first == 2);
      engine.forget(2);
      finish(engine, ticket);
      CHECK(buffer.holds(2));
    }
    engine.abort();  // as the group does when it hears of a death
    engine.forget(2);
    if (!entered) {
      const Entry entry = come_back(engine, 5);
      CHECK(entry.stage == Stage::entered);
      CHECK(entry.calls == (reached == Stage::outside ? 5 : 100));
    }
    CHECK(sum(engine, buffer, 1) == 2);
    for (int round = 0; round < 5; ++round) leave_and_come_back(engine);
    CHECK(sum(engine, buffer, 1) == 2);
    CHECK((engine.members() == std::vector<int>{0, 1}));
  });
}

// Who waits in vain is told in time, and for whom; it may wait again.
void test_deadline() {
  std::atomic<bool> waited{false};
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 10, false);
    if (rank == 1) {
      while (!waited) yield_core();
      CHECK(sum(engine, buffer, 7) == 7);
      leave_and_come_back(engine);
    } else {
      CHECK(engine.leave());
      CHECK(engine.rejoin(0, kSecond).stage == Stage::waiting);
      const Entry entry = engine.rejoin(0, kSecond / 50);
      CHECK(entry.verdict.outcome == Outcome::pending && entry.stage == Stage::waiting);
      CHECK((engine.awaited() == std::vector<int>{1}));
      waited = true;
      CHECK(come_back(engine).stage == Stage::entered);
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
      CHECK(come_back(engine).verdict.outcome == Outcome::aborted);
      CHECK(now_ns() - started < 10 * kSecond);
    });
    engine.abort();
    other.join();
  });
}

// Of a transfer that nobody will come for nothing is left; the next one finds its place free.
void test_cancelled_transfers() {
  run(2, [](Engine& engine, int rank) {
    Buffer lost(engine, 1, false), got(engine, 1, false), sent(engine, 1, false);
    const int other = 1 - rank;
    const auto ticket = engine.receive(other, 3, lost.bytes(), lost.size());
    CHECK(engine.cancel_transfer(ticket));
    CHECK(!engine.cancel_transfer(ticket));
    CHECK(engine.wait_transfer(ticket, 20 * kSecond).state == Transfers::State::cancelled);
    leave_and_come_back(engine);
    sent.fill(rank);
    engine.send(other, 3, sent.bytes(), sent.size());
    const auto received = engine.receive(other, 3, got.bytes(), got.size());
    CHECK(engine.wait_transfer(received, 20 * kSecond).state == Transfers::State::finished);
    CHECK(got.holds(other) && lost.holds(0));
  });
}

}  // namespace

int main() {
  for (const Driven by : {Driven::by_callers, Driven::by_threads, Driven::by_both}) {
    driven = by;
    for (const int ranks : {1, 2, 3, 5}) {
      test_rounds(ranks);
      test_nothing_but_coming_back(ranks);
    }
    for (const Stage reached : {Stage::outside, Stage::waiting, Stage::entering})
      test_death(reached);
    test_deadline();
    test_abort();
    test_cancelled_transfers();
  }
  return tell();
}
