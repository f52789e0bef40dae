// The engine, with threads for ranks: every collective on every way that data can take, in sizes so
// small that each test goes around the rings and through many windows.

#include <atomic>
#include <thread>
#include <vector>

#include "copy.hpp"
#include "harness.hpp"

namespace {

int value(int rank, std::size_t i, int salt) { return (rank + 1) * 1000 + static_cast<int>(i) + salt; }

void test_allreduce(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    int salt = 0;
    for (const bool shared : {false, true})
      for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 48u, 100u, 1000u}) {
        Buffer buffer(engine, count, shared);
        for (std::size_t i = 0; i < count; ++i) buffer[i] = value(rank, i, salt);
        finish(engine, engine.issue(in_place(Kind::allreduce, buffer)));
        bool right = true;
        for (std::size_t i = 0; i < count; ++i) {
          int sum = 0;
          for (int r = 0; r < engine.ranks(); ++r) sum += value(r, i, salt);
          right = right && buffer[i] == sum;
        }
        CHECK(right);
        ++salt;
      }
  });
}

// Many calls under way at once, more than the ring holds, waited for in the end.
void test_asynchronous(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    constexpr std::size_t kCalls = 150;
    std::vector<Buffer> buffers;
    std::uint64_t last = 0;
    for (std::size_t call = 0; call < kCalls; ++call) {
      const std::size_t count = call % 40;
      buffers.emplace_back(engine, count, call % 3 == 0, call * 256);
      for (std::size_t i = 0; i < count; ++i) buffers[call][i] = rank + static_cast<int>(call);
      last = engine.issue(in_place(Kind::allreduce, buffers[call]));
    }
    finish(engine, last);
    bool right = true;
    const int ranks_sum = engine.ranks() * (engine.ranks() - 1) / 2;
    for (std::size_t call = 0; call < kCalls; ++call)
      for (std::size_t i = 0; i < call % 40; ++i)
        right = right && buffers[call][i] == ranks_sum + engine.ranks() * static_cast<int>(call);
    CHECK(right);
    // Nobody may let go of its buffers before all have read them.
    Buffer none(engine, 0, false);
    finish(engine, engine.issue(in_place(Kind::barrier, none)));
  });
}

// The way of who has moments only: it keeps the order, whoever else issues, and leaves nothing out.
void test_issuing_in_moments(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    constexpr std::size_t kCalls = 200;
    std::vector<Buffer> buffers;
    for (std::size_t call = 0; call < kCalls; ++call)
      buffers.emplace_back(engine, call % 7 == 0 ? 100 : 5, call % 2 == 0, call * 512);
    std::uint64_t last = 0;
    for (std::size_t call = 0; call < kCalls; ++call) {
      buffers[call].fill(rank + 1);
      Engine::Issued issued;
      if (call % 5 != 0) issued = engine.try_issue(in_place(Kind::allreduce, buffers[call]));
      if (issued.ticket == 0)  // somebody is at it, or it is this one's turn to go the other way
        issued.ticket = engine.issue(in_place(Kind::allreduce, buffers[call]));
      CHECK(issued.ticket == last + 1);
      last = issued.ticket;
      if (issued.more) engine.test(last);
      if (call % 3 != 0) continue;
      finish(engine, last);
      CHECK(engine.ended_well(last));
      CHECK(buffers[call].holds(engine.ranks() * (engine.ranks() + 1) / 2));
    }
    finish(engine, last);
    Buffer none(engine, 0, false);
    finish(engine, engine.issue(in_place(Kind::barrier, none)));
  });
}

void test_issuing_to_a_failed_engine() {
  run(1, [&](Engine& engine, int) {
    Buffer buffer(engine, 5, false);
    engine.abort();
    CHECK(engine.try_issue(in_place(Kind::allreduce, buffer)).ticket == 0);
    CHECK(!engine.ended_well(1));
  });
}

void test_broadcast_and_reduce(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    for (int root = 0; root < engine.ranks(); ++root)
      for (const bool shared : {false, true})
        for (const std::size_t count : {3u, 300u}) {
          Buffer copy(engine, count, shared);
          for (std::size_t i = 0; i < count; ++i) copy[i] = value(rank, i, root);
          finish(engine, engine.issue(in_place(Kind::broadcast, copy, root)));
          CHECK(copy[count - 1] == value(root, count - 1, root));

          Buffer sum(engine, count, shared, 4096);
          for (std::size_t i = 0; i < count; ++i) sum[i] = rank + 1;
          finish(engine, engine.issue(in_place(Kind::reduce, sum, root)));
          const int all = engine.ranks() * (engine.ranks() + 1) / 2;
          CHECK(sum[count - 1] == (rank == root ? all : rank + 1));
        }
  });
}

void test_gathers(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    const auto n = static_cast<std::size_t>(engine.ranks());
    for (const bool shared : {false, true})
      for (const std::size_t count : {2u, 130u}) {
        Buffer mine(engine, count, shared);
        for (std::size_t i = 0; i < count; ++i) mine[i] = value(rank, i, 0);
        std::vector<int> all(n * count);
        Request gather = in_place(Kind::allgather, mine);
        gather.outputs.clear();
        for (std::size_t r = 0; r < n; ++r)
          gather.outputs.push_back(reinterpret_cast<char*>(all.data() + r * count));
        finish(engine, engine.issue(std::move(gather)));
        bool right = true;
        for (std::size_t r = 0; r < n; ++r)
          right = right && all[r * count + count - 1] == value(static_cast<int>(r), count - 1, 0);
        CHECK(right);

        // What was gathered, reduced and scattered again: every rank has its part times the ranks.
        Buffer whole(engine, n * count, shared, 16384);
        for (std::size_t i = 0; i < n * count; ++i) whole[i] = all[i];
        std::vector<int> part(count);
        Request scatter = in_place(Kind::reduce_scatter, whole);
        scatter.output_bytes = count * sizeof(int);
        scatter.outputs = {reinterpret_cast<char*>(part.data())};
        finish(engine, engine.issue(std::move(scatter)));
        CHECK(part[count - 1] == engine.ranks() * value(rank, count - 1, 0));
        Buffer none(engine, 0, false);
        finish(engine, engine.issue(in_place(Kind::barrier, none)));
      }
  });
}

void test_exchange(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    const auto n = static_cast<std::size_t>(engine.ranks());
    for (const std::size_t grain : {1u, 70u}) {  // rank s sends (s + r) * grain ints to rank r
      std::vector<std::uint64_t> send{0}, receive{0};
      for (std::size_t r = 0; r < n; ++r) {
        const auto length = (static_cast<std::size_t>(rank) + r) * grain * sizeof(int);
        send.push_back(send.back() + length);
        receive.push_back(receive.back() + length);
      }
      std::vector<int> mine(send.back() / sizeof(int), rank), got(receive.back() / sizeof(int), -1);
      Request request;
      request.kind = Kind::alltoall;
      request.input = reinterpret_cast<char*>(mine.data());
      request.bytes = send.back();
      request.outputs = {reinterpret_cast<char*>(got.data())};
      request.output_bytes = receive.back();
      request.send_at = send;
      request.receive_at = receive;
      finish(engine, engine.issue(std::move(request)));
      bool right = true;
      for (std::size_t r = 0; r < n; ++r)
        for (std::size_t at = receive[r] / sizeof(int); at < receive[r + 1] / sizeof(int); ++at)
          right = right && got[at] == static_cast<int>(r);
      CHECK(right);
    }
  });
}

Request exchange(Buffer& mine, std::vector<int>& got, std::vector<std::uint64_t> send,
                 std::vector<std::uint64_t> receive) {
  Request request;
  request.kind = Kind::alltoall;
  request.input = mine.bytes();
  request.bytes = mine.size();
  request.outputs = {reinterpret_cast<char*>(got.data())};
  request.output_bytes = got.size() * sizeof(int);
  request.send_at = std::move(send);
  request.receive_at = std::move(receive);
  return request;
}

// A small input among large ones is read where it lies, like them: it is not the caller's again
// before everybody has read it.
void test_uneven_exchange() {
  std::atomic<bool> arrived{false}, looked{false};
  run(2, [&](Engine& engine, int rank) {
    const std::size_t mine = rank == 0 ? 1 : 100;  // ints for each rank
    Buffer buffer(engine, 2 * mine, true);
    for (std::size_t i = 0; i < 2 * mine; ++i) buffer[i] = rank + 1;
    std::vector<int> got(101);
    const auto part = mine * sizeof(int);
    const auto ask = [&] {
      return engine.issue(exchange(buffer, got, {0, part, 2 * part}, {0, 4, 404}));
    };
    if (rank == 0) {
      while (!arrived) yield_core();
      const auto ticket = ask();
      CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
      looked = true;
      finish(engine, ticket);
      buffer[0] = buffer[1] = -1;
    } else {
      const auto ticket = ask();
      arrived = true;
      while (!looked) yield_core();
      finish(engine, ticket);
    }
    CHECK(got[0] == 1 && got[1] == 2 && got[100] == 2);
  });
}

// Who is sent more or less than it has room for says so, and nothing is stored.
void test_exchange_that_does_not_fit() {
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 4, false);
    std::vector<int> got(4, 7);
    const auto receive = rank == 0 ? 8u : 4u;  // rank 1 expects one int of rank 0, which sends two
    const auto verdict =
        engine.wait(engine.issue(exchange(buffer, got, {0, 8, 16}, {0, receive, receive + 8})),
                    20 * kSecond);
    if (rank == 0) return;
    CHECK(verdict.outcome == Outcome::mismatch);
    CHECK(verdict.first == 0 && verdict.second == 1);
    CHECK(got == std::vector<int>(4, 7));
  });
}

void test_transfers() {
  run(3, [](Engine& engine, int rank) {
    std::vector<int> first(100, rank), second(7, 10 + rank);
    if (rank == 0) {
      // Received in another order than sent, and from anybody.
      int got[2][107];
      for (int from = 1; from < 3; ++from) {
        auto two = engine.receive(from, 2, reinterpret_cast<char*>(got[from - 1]), 7 * sizeof(int));
        CHECK(engine.wait_transfer(two, 20 * kSecond).state == Transfers::State::finished);
        CHECK(got[from - 1][6] == 10 + from);
      }
      int seen = 0;
      for (int i = 0; i < 2; ++i) {
        auto one = engine.receive(-1, 1, reinterpret_cast<char*>(got[i]), 100 * sizeof(int));
        const auto status = engine.wait_transfer(one, 20 * kSecond);
        CHECK(status.state == Transfers::State::finished);
        CHECK(got[i][99] == status.peer);
        seen += status.peer;
      }
      CHECK(seen == 3);
    } else {
      auto one = engine.send(0, 1, reinterpret_cast<char*>(first.data()), 100 * sizeof(int));
      auto two = engine.send(0, 2, reinterpret_cast<char*>(second.data()), 7 * sizeof(int));
      CHECK(engine.wait_transfer(one, 20 * kSecond).state == Transfers::State::finished);
      CHECK(engine.wait_transfer(two, 20 * kSecond).state == Transfers::State::finished);
    }
  });
}

void test_leaving() {
  run(3, [](Engine& engine, int rank) {
    Buffer buffer(engine, 40, false);
    const auto sum = [&](int mine) {
      for (std::size_t i = 0; i < 40; ++i) buffer[i] = mine;
      finish(engine, engine.issue(in_place(Kind::allreduce, buffer)));
      return buffer[39];
    };
    CHECK(sum(1) == 3);
    if (rank == 1) {
      CHECK(engine.leave());
      return;
    }
    CHECK(sum(1) == 2);
    CHECK(sum(5) == 10);
    CHECK((engine.members() == std::vector<int>{0, 2}));
  });
}

// Who still has something under way cannot leave, for the others would not look after it.
void test_leaving_too_early() {
  std::atomic<bool> tried{false};
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 40, false);
    if (rank == 0) {
      const auto ticket = engine.issue(in_place(Kind::allreduce, buffer));
      CHECK(!engine.leave());
      tried = true;
      finish(engine, ticket);
      CHECK(engine.leave());
    } else {
      while (!tried) yield_core();
      finish(engine, engine.issue(in_place(Kind::allreduce, buffer)));
    }
  });
}

// What an absent rank was to hand out fails alike for all, and the group goes on.
void test_root_that_left() {
  run(3, [](Engine& engine, int rank) {
    Buffer buffer(engine, 40, false);
    if (rank == 1) {
      CHECK(engine.leave());
      return;
    }
    const auto verdict =
        engine.wait(engine.issue(in_place(Kind::broadcast, buffer, 1)), 20 * kSecond);
    CHECK(verdict.outcome == Outcome::rootless && verdict.first == 1);
    finish(engine, engine.issue(in_place(Kind::broadcast, buffer, 2)));
  });
}

// Rank 2 dies after it has described a call. Its words are frozen from then on, so the
// others come to the same end: what it took no part in goes on, what it left undone is torn.
void test_going_on(std::size_t count, bool shared, bool torn) {
  std::atomic<bool> dead{false};
  run(3, [&](Engine& engine, int rank) {
    Buffer buffer(engine, count, shared);
    const auto sum = [&] {
      for (std::size_t i = 0; i < count; ++i) buffer[i] = 1;
      return engine.issue(in_place(Kind::allreduce, buffer));
    };
    finish(engine, sum());
    if (rank == 2) {
      sum();  // described, and nothing done for it any more
      dead = true;
      return;
    }
    while (!dead) yield_core();
    const auto ticket = sum();
    if (shared || torn) CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
    engine.abort();  // as the group does when it hears of a death
    engine.forget(2);
    const auto verdict = engine.wait(ticket, 20 * kSecond);
    CHECK(verdict.outcome == (torn ? Outcome::torn : Outcome::finished));
    if (torn) CHECK(verdict.first == 2);
    if (!torn) CHECK(buffer[count - 1] == 3);
    finish(engine, sum());
    CHECK(buffer[0] == 2 && buffer[count - 1] == 2);
    CHECK((engine.members() == std::vector<int>{0, 1}));
  });
}

void test_disagreement_and_deadline() {
  run(2, [](Engine& engine, int rank) {
    Buffer buffer(engine, rank == 0 ? 4u : 5u, false);
    const auto verdict = engine.wait(engine.issue(in_place(Kind::allreduce, buffer)), 20 * kSecond);
    CHECK(verdict.outcome == Outcome::mismatch);
    CHECK(verdict.first == 0 && verdict.second == 1);
  });
  run(2, [](Engine& engine, int rank) {
    if (rank == 1) return;
    Buffer buffer(engine, 4, false);
    const auto ticket = engine.issue(in_place(Kind::allreduce, buffer));
    CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
    engine.abort();
    CHECK(engine.wait(ticket, 20 * kSecond).outcome == Outcome::aborted);
  });
}

// A death is noticed even while the rank in front of the dead one is alive and late.
void test_death_behind_a_late_rank() {
  run(3, [](Engine& engine, int rank) {
    if (rank != 0) return;
    take_for_dead(engine, 2);
    Buffer buffer(engine, 4, false);
    const auto ticket = engine.issue(in_place(Kind::allreduce, buffer));
    const auto verdict = engine.wait(ticket, 20 * kSecond);
    CHECK(verdict.outcome == Outcome::dead);
    CHECK(verdict.first == 2);
  });
}

// Nothing of a transfer is touched after an abort, and nobody waits for it to move.
void test_abort_ends_transfers() {
  run(2, [](Engine& engine, int rank) {
    Buffer buffer(engine, 100, false);
    if (rank == 0) {
      const auto ticket = engine.receive(1, 0, buffer.bytes(), buffer.size());
      std::thread other([&] {
        const auto started = now_ns();
        CHECK(engine.wait_transfer(ticket, 20 * kSecond).state == Transfers::State::stopped);
        CHECK(now_ns() - started < 10 * kSecond);
      });
      engine.abort();
      other.join();
    }
  });
}

// Whoever comes late to a call that a rank has given up leaves that rank's buffer alone.
void test_nobody_writes_to_who_has_given_up() {
  std::atomic<bool> arrived{false}, gave_up{false}, tried{false};
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 1000, true);
    for (std::size_t i = 0; i < 1000; ++i) buffer[i] = 1;
    if (rank == 0) {
      while (!arrived) yield_core();
      const auto ticket = engine.issue(in_place(Kind::allreduce, buffer));
      CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
      engine.abort();
      for (std::size_t i = 0; i < 1000; ++i) buffer[i] = 5;
      gave_up = true;
      while (!tried) yield_core();
      bool right = true;
      for (std::size_t i = 0; i < 1000; ++i) right = right && buffer[i] == 5;
      CHECK(right);
    } else {
      const auto ticket = engine.issue(in_place(Kind::allreduce, buffer));
      arrived = true;
      while (!gave_up) yield_core();
      CHECK(engine.wait(ticket, kSecond / 20).outcome == Outcome::pending);
      tried = true;
    }
  });
}

void test_wrong_region() {
  Region region = Region::create("memfd", 2, tiny());
  bool refused = false;
  try {
    Region::open(region.path(), region.token() + 2, 2, tiny());
  } catch (const std::exception&) {
    refused = true;
  }
  CHECK(refused);
  Region same = Region::open(region.path(), region.token(), 2, tiny());
  same.control(1).arrived.publish(7);
  CHECK(region.control(1).arrived.read() == 7);
}

// Copies past the cache, whatever lies before and after whole lines, and however little it is.
void test_streamed_copies() {
  std::vector<char> from(20'000), into(20'000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 % 251);
  for (const std::size_t length : {0u, 1u, 64u, 127u, 17'003u})
    for (const std::size_t skew : {0u, 1u, 63u}) {
      std::fill(into.begin(), into.end(), char{1});
      stream_bytes(into.data() + skew, from.data() + 5, length);
      const auto begin = into.begin() + static_cast<long>(skew);
      const auto end = begin + static_cast<long>(length);
      CHECK(std::equal(begin, end, from.begin() + 5));
      CHECK(*end == 1);
      CHECK(skew == 0 || *(begin - 1) == 1);
    }
}

// Whichever way is being tried, the bytes arrive.
void test_packing() {
  Packer packer;
  std::vector<char> from(40'000), into(40'000);
  for (int turn = 0; turn < 200; ++turn) {
    std::fill(from.begin(), from.end(), static_cast<char>(turn));
    const std::size_t length = turn % 3 == 0 ? 100 : from.size();
    packer.copy(into.data(), from.data(), length);
    CHECK(std::equal(from.begin(), from.begin() + static_cast<long>(length), into.begin()));
  }
}

// A root that dies after it has described a broadcast: who was to get a part of it from the root is
// left without, and so all say; where nobody was, nothing is missing.
void test_lost_root(bool shared) {
  std::atomic<bool> dead{false};
  run(3, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 300, shared || rank == 2);
    for (std::size_t i = 0; i < 300; ++i) buffer[i] = rank;
    if (rank == 2) {
      engine.issue(in_place(Kind::broadcast, buffer, 2));
      dead = true;
      return;
    }
    while (!dead) yield_core();
    const auto ticket = engine.issue(in_place(Kind::broadcast, buffer, 2));
    engine.forget(2);
    const auto verdict = engine.wait(ticket, 20 * kSecond);
    CHECK(verdict.outcome == (shared ? Outcome::torn : Outcome::finished));
    CHECK(buffer[0] == 2 && (shared || buffer[299] == 2));
    finish(engine, engine.issue(in_place(Kind::broadcast, buffer, 1)));
  });
}

void test_all_ways() {
  for (const int ranks : {1, 2, 3, 5}) {
    test_allreduce(ranks);
    test_asynchronous(ranks);
    test_issuing_in_moments(ranks);
    test_broadcast_and_reduce(ranks);
    test_gathers(ranks);
    test_exchange(ranks);
  }
  test_issuing_to_a_failed_engine();
  test_exchange_that_does_not_fit();
  test_transfers();
  test_leaving();
  test_leaving_too_early();
  test_root_that_left();
  test_disagreement_and_deadline();
  test_death_behind_a_late_rank();
  test_abort_ends_transfers();
}

// These count on a rank 2 that does nothing when it is not in the engine.
void test_deaths() {
  test_going_on(10, false, false);  // small: its input lies in its slot
  test_going_on(300, true, true);   // its slice was left undone
  test_going_on(300, false, true);  // its windows were left empty
  test_lost_root(true);
  test_lost_root(false);
}

}  // namespace

int main() {
  for (const Driven by : {Driven::by_callers, Driven::by_threads, Driven::by_both}) {
    driven = by;
    test_all_ways();
    if (by != Driven::by_threads) test_deaths();
  }
  driven = Driven::by_callers;  // these count on ranks that do nothing when they are not in it
  test_uneven_exchange();
  test_nobody_writes_to_who_has_given_up();
  test_streamed_copies();
  test_packing();
  test_wrong_region();
  return tell();
}
