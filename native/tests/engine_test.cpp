// The engine with threads as ranks: every collective on every data path.

#include <atomic>
#include <bit>
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
        finish(engine, engine.issue(in_place(Collective::allreduce, buffer)));
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

// The definition of the order of a tree.
float sum_in_order(const std::vector<float>& inputs, const std::vector<std::uint8_t>& merges) {
  std::vector<float> sums;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    sums.push_back(inputs[r]);
    for (int i = 0; i < merges[r]; ++i) {
      const float right = sums.back();
      sums.pop_back();
      sums.back() += right;
    }
  }
  CHECK(sums.size() == 1);
  return sums[0];
}

// An order whose sums differ from those of other orders.
std::vector<std::uint8_t> some_order(std::size_t inputs, std::size_t salt) {
  std::vector<std::uint8_t> merges(inputs);
  std::size_t sums = 0;
  for (std::size_t r = 0; r < inputs; ++r) {
    const std::size_t can_merge = sums++;
    const std::size_t merged = r + 1 == inputs ? can_merge : (r * 5 + salt) % 3 % (can_merge + 1);
    merges[r] = static_cast<std::uint8_t>(merged);
    sums -= merged;
  }
  return merges;
}

float part(int rank, std::size_t slot, std::size_t i, std::size_t salt) {
  return static_cast<float>((static_cast<std::size_t>(rank) * 37 + slot * 11 + i * 3 + salt) % 101) /
         (slot % 2 == 0 ? 0.7f : 700.0f);
}

// Ranks have unequal numbers of inputs, and one may have none. All but the result stays, inputs too.
void test_ordered_allreduce(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    std::size_t salt = 0;
    for (const std::size_t most : {1u, 2u, 3u})
      for (const std::size_t count : {0u, 1u, 3u, 100u, 333u})
        for (const bool shared : {false, true}) {
          ++salt;
          const std::size_t stride = count + salt % 3;
          std::vector<std::uint16_t> inputs;
          for (int r = 0; r < ranks; ++r)
            inputs.push_back(static_cast<std::uint16_t>(
                r == 0 ? most : (static_cast<std::size_t>(r) + salt) % (most + 1)));
          std::size_t all = 0;
          for (const auto number : inputs) all += number;
          const auto merges = some_order(all, salt);
          const double divisor = salt % 2 == 0 ? 3.0 : 4.0;
          const std::size_t size = (most + 1) * stride;
          Buffer buffer(engine, size, shared);
          const auto before = [&](std::size_t i) {
            const bool is_input = i >= stride && i % stride < count;
            return is_input ? part(rank, i / stride - 1, i % stride, salt) : -1.0f;
          };
          for (std::size_t i = 0; i < size; ++i) buffer[i] = std::bit_cast<int>(before(i));
          Request request = tree_sum(buffer.bytes(), count, stride, inputs, merges, divisor);
          const bool large = request.bytes > tiny().small;
          CHECK((engine.tree_error(request) != nullptr) == (large && !shared));
          if (large && !shared) continue;
          finish(engine, engine.issue(std::move(request)));
          bool right = true;
          for (std::size_t i = 0; i < size; ++i) {
            float wanted = before(i);
            if (i < count) {
              std::vector<float> values;
              for (int r = 0; r < ranks; ++r)
                for (std::size_t slot = 0; slot < inputs[static_cast<std::size_t>(r)]; ++slot)
                  values.push_back(part(r, slot, i, salt));
              wanted = sum_in_order(values, merges) / static_cast<float>(divisor);
            }
            right = right && buffer[i] == std::bit_cast<int>(wanted);
          }
          CHECK(right);
        }
  });
}

void test_tree_errors() {
  Region region = Region::create("memfd", 2, tiny());
  Engine engine(region.alias(), 0, 2);
  Buffer shared(engine, 150, true);
  char* const data = shared.bytes();
  const auto error = [&](const Request& request) { return engine.tree_error(request) != nullptr; };
  CHECK(!error(tree_sum(data, 50, 50, {2, 1}, {0, 0, 2}, 3.0)));
  CHECK(error(tree_sum(data, 50, 50, {2}, {0, 1})));
  CHECK(error(tree_sum(data, 50, 50, {2, 1, 1}, {0, 1, 1, 1})));
  CHECK(error(tree_sum(data, 50, 50, {2, 1}, {0, 1})));
  CHECK(error(tree_sum(data, 50, 50, {2, 1}, {0, 0, 1})));
  CHECK(error(tree_sum(data, 50, 49, {2, 1}, {0, 1, 1})));
  CHECK(error(tree_sum(data, 50, 50, {2, 1}, {0, 1, 1}, 0.0)));
  CHECK(error(tree_sum(data, 50, 50, {200, 57}, std::vector<std::uint8_t>(257, 1))));
  Request request = tree_sum(data, 50, 50, {2, 1}, {0, 1, 1});
  request.bytes -= 4;
  CHECK(error(request));
  request.bytes += 4;
  request.input += 4;
  CHECK(error(request));
  request.input -= 4;
  CHECK(!error(request));
  request.reduction.type = DType::int32;
  CHECK(error(request));
  request.reduction.type = DType::float64;
  request.output_bytes -= 4;
  CHECK(error(request));
}

// More operations in flight than the ring holds.
void test_asynchronous(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    constexpr std::size_t kCalls = 150;
    std::vector<Buffer> buffers;
    std::uint64_t last = 0;
    for (std::size_t call = 0; call < kCalls; ++call) {
      const std::size_t count = call % 40;
      buffers.emplace_back(engine, count, call % 3 == 0, call * 256);
      for (std::size_t i = 0; i < count; ++i) buffers[call][i] = rank + static_cast<int>(call);
      last = engine.issue(in_place(Collective::allreduce, buffers[call]));
    }
    finish(engine, last);
    bool right = true;
    const int ranks_sum = engine.ranks() * (engine.ranks() - 1) / 2;
    for (std::size_t call = 0; call < kCalls; ++call)
      for (std::size_t i = 0; i < call % 40; ++i)
        right = right && buffers[call][i] == ranks_sum + engine.ranks() * static_cast<int>(call);
    CHECK(right);
    // Buffers must not be freed before all ranks have read them.
    barrier(engine);
  });
}

// try_issue keeps the order of tickets when mixed with issue.
void test_try_issue(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    constexpr std::size_t kCalls = 200;
    std::vector<Buffer> buffers;
    for (std::size_t call = 0; call < kCalls; ++call)
      buffers.emplace_back(engine, call % 7 == 0 ? 100 : 5, call % 2 == 0, call * 512);
    std::uint64_t last = 0;
    for (std::size_t call = 0; call < kCalls; ++call) {
      buffers[call].fill(rank + 1);
      Engine::Issued issued;
      if (call % 5 != 0) issued = engine.try_issue(in_place(Collective::allreduce, buffers[call]));
      if (issued.ticket == 0)  // the engine is busy, or this call uses issue()
        issued.ticket = engine.issue(in_place(Collective::allreduce, buffers[call]));
      CHECK(issued.ticket == last + 1);
      last = issued.ticket;
      if (issued.more) engine.test(last);
      if (call % 3 != 0) continue;
      finish(engine, last);
      CHECK(engine.has_succeeded(last));
      CHECK(buffers[call].holds(engine.ranks() * (engine.ranks() + 1) / 2));
    }
    finish(engine, last);
    barrier(engine);
  });
}

void test_try_issue_on_failed_engine() {
  run(1, [&](Engine& engine, int) {
    Buffer buffer(engine, 5, false);
    engine.abort();
    CHECK(engine.try_issue(in_place(Collective::allreduce, buffer)).ticket == 0);
    CHECK(!engine.has_succeeded(1));
  });
}

void test_broadcast_and_reduce(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    for (int root = 0; root < engine.ranks(); ++root)
      for (const bool shared : {false, true})
        for (const std::size_t count : {3u, 300u}) {
          Buffer copy(engine, count, shared);
          for (std::size_t i = 0; i < count; ++i) copy[i] = value(rank, i, root);
          finish(engine, engine.issue(in_place(Collective::broadcast, copy, root)));
          CHECK(copy[count - 1] == value(root, count - 1, root));

          Buffer sum(engine, count, shared, 4096);
          sum.fill(rank + 1);
          finish(engine, engine.issue(in_place(Collective::reduce, sum, root)));
          const int all = engine.ranks() * (engine.ranks() + 1) / 2;
          CHECK(sum[count - 1] == (rank == root ? all : rank + 1));
        }
  });
}

void test_allgather_and_reduce_scatter(int ranks) {
  run(ranks, [&](Engine& engine, int rank) {
    const auto n = static_cast<std::size_t>(engine.ranks());
    for (const bool shared : {false, true})
      for (const std::size_t count : {2u, 130u}) {
        Buffer mine(engine, count, shared);
        for (std::size_t i = 0; i < count; ++i) mine[i] = value(rank, i, 0);
        std::vector<int> all(n * count);
        Request gather = in_place(Collective::allgather, mine);
        gather.outputs.clear();
        for (std::size_t r = 0; r < n; ++r)
          gather.outputs.push_back(reinterpret_cast<char*>(all.data() + r * count));
        finish(engine, engine.issue(std::move(gather)));
        bool right = true;
        for (std::size_t r = 0; r < n; ++r)
          right = right && all[r * count + count - 1] == value(static_cast<int>(r), count - 1, 0);
        CHECK(right);

        // Reduce-scatter of what was gathered: each rank gets its part times the world size.
        Buffer whole(engine, n * count, shared, 16384);
        for (std::size_t i = 0; i < n * count; ++i) whole[i] = all[i];
        std::vector<int> part(count);
        Request scatter = in_place(Collective::reduce_scatter, whole);
        scatter.output_bytes = count * sizeof(int);
        scatter.outputs = {reinterpret_cast<char*>(part.data())};
        finish(engine, engine.issue(std::move(scatter)));
        CHECK(part[count - 1] == engine.ranks() * value(rank, count - 1, 0));
        barrier(engine);
      }
  });
}

void test_alltoall(int ranks) {
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
      request.kind = Collective::alltoall;
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

Request alltoall(Buffer& mine, std::vector<int>& got, std::vector<std::uint64_t> send,
                 std::vector<std::uint64_t> receive) {
  Request request;
  request.kind = Collective::alltoall;
  request.input = mine.bytes();
  request.bytes = mine.size();
  request.outputs = {reinterpret_cast<char*>(got.data())};
  request.output_bytes = got.size() * sizeof(int);
  request.send_at = std::move(send);
  request.receive_at = std::move(receive);
  return request;
}

// A small input among large ones is read in place, so the call does not finish before all have read it.
void test_uneven_alltoall() {
  std::atomic<bool> arrived{false}, checked{false};
  run(2, [&](Engine& engine, int rank) {
    const std::size_t mine = rank == 0 ? 1 : 100;  // ints for each rank
    Buffer buffer(engine, 2 * mine, true);
    for (std::size_t i = 0; i < 2 * mine; ++i) buffer[i] = rank + 1;
    std::vector<int> got(101);
    const auto part = mine * sizeof(int);
    const auto issue = [&] {
      return engine.issue(alltoall(buffer, got, {0, part, 2 * part}, {0, 4, 404}));
    };
    if (rank == 0) {
      while (!arrived) yield_core();
      const auto ticket = issue();
      CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
      checked = true;
      finish(engine, ticket);
      buffer[0] = buffer[1] = -1;
    } else {
      const auto ticket = issue();
      arrived = true;
      while (!checked) yield_core();
      finish(engine, ticket);
    }
    CHECK(got[0] == 1 && got[1] == 2 && got[100] == 2);
  });
}

// A rank that is sent more or less than it has room for reports a mismatch and stores nothing.
void test_alltoall_size_mismatch() {
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 4, false);
    std::vector<int> got(4, 7);
    const auto receive = rank == 0 ? 8u : 4u;  // rank 1 has room for one int of rank 0, which sends two
    const auto result =
        engine.wait(engine.issue(alltoall(buffer, got, {0, 8, 16}, {0, receive, receive + 8})),
                    20 * kSecond);
    if (rank == 0) return;
    CHECK(result.outcome == Outcome::mismatch);
    CHECK(result.first == 0 && result.second == 1);
    CHECK(got == std::vector<int>(4, 7));
  });
}

void test_transfers() {
  run(3, [](Engine& engine, int rank) {
    std::vector<int> first(100, rank), second(7, 10 + rank);
    if (rank == 0) {
      // Received in another order than sent, and from any sender.
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

void test_leave() {
  run(3, [](Engine& engine, int rank) {
    Buffer buffer(engine, 40, false);
    const auto sum = [&](int mine) {
      buffer.fill(mine);
      finish(engine, engine.issue(in_place(Collective::allreduce, buffer)));
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

// A rank with operations in flight cannot leave.
void test_leave_with_operations_in_flight() {
  std::atomic<bool> left_too_early{false};
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 40, false);
    if (rank == 0) {
      const auto ticket = engine.issue(in_place(Collective::allreduce, buffer));
      CHECK(!engine.leave());
      left_too_early = true;
      finish(engine, ticket);
      CHECK(engine.leave());
    } else {
      while (!left_too_early) yield_core();
      finish(engine, engine.issue(in_place(Collective::allreduce, buffer)));
    }
  });
}

// A broadcast from a departed root fails on all ranks, and the group continues.
void test_root_that_left() {
  run(3, [](Engine& engine, int rank) {
    Buffer buffer(engine, 40, false);
    if (rank == 1) {
      CHECK(engine.leave());
      return;
    }
    const auto result =
        engine.wait(engine.issue(in_place(Collective::broadcast, buffer, 1)), 20 * kSecond);
    CHECK(result.outcome == Outcome::root_left && result.first == 1);
    finish(engine, engine.issue(in_place(Collective::broadcast, buffer, 2)));
  });
}

// A tree needs every rank, and the group continues without it.
void test_tree_without_rank(bool excluded) {
  run(3, [&](Engine& engine, int rank) {
    if (rank == 1) {
      if (!excluded) CHECK(engine.leave());
      return;
    }
    if (excluded) engine.exclude(1);
    for (const std::size_t count : {10u, 300u}) {
      Buffer buffer(engine, 2 * count, true);
      buffer.fill_floats(2.0f);
      const auto ticket = engine.issue(tree_sum(buffer.bytes(), count, 3));
      const auto result = engine.wait(ticket, 20 * kSecond);
      CHECK(result.outcome == Outcome::root_left && result.first == 1);
      CHECK(buffer.holds_floats(2.0f));
      buffer.fill(1);
      finish(engine, engine.issue(in_place(Collective::allreduce, buffer)));
      CHECK(buffer.holds(2));
      barrier(engine);
    }
  });
}

// Different orders, divisors or lengths are reported; lengths also if the fingerprints collide.
void test_tree_mismatch() {
  for (const int difference : {0, 1, 2, 3})
    run(2, [&](Engine& engine, int rank) {
      Buffer buffer(engine, 800, true);
      buffer.fill_floats(1.0f);
      const bool other = rank == 1;
      Request request = tree_sum(buffer.bytes(), 100, 100, {1, 2},
                                 other && difference == 0 ? std::vector<std::uint8_t>{0, 0, 2}
                                                          : std::vector<std::uint8_t>{0, 1, 1},
                                 other && difference == 1 ? 2.0 : 1.0);
      if (other && difference >= 2) {
        const auto fingerprint = request.fingerprint;
        request = difference == 2 ? tree_sum(buffer.bytes(), 100, 200, {1, 3}, {0, 1, 1, 1})
                                  : tree_sum(buffer.bytes(), 200, 200, {1, 1}, {0, 1});
        request.fingerprint = fingerprint;
      }
      const auto result = engine.wait(engine.issue(std::move(request)), 20 * kSecond);
      CHECK(result.outcome == Outcome::mismatch && result.first == 0 && result.second == 1);
      CHECK(buffer.holds_floats(1.0f));
    });
}

// Rank 2 dies after it has announced an operation. The survivors agree: it finishes if rank 2 was not
// needed any more, and is torn otherwise; later operations run without it.
void test_exclude(std::size_t count, bool shared, bool torn) {
  std::atomic<bool> dead{false};
  run(3, [&](Engine& engine, int rank) {
    Buffer buffer(engine, count, shared);
    const auto sum = [&] {
      buffer.fill(1);
      return engine.issue(in_place(Collective::allreduce, buffer));
    };
    finish(engine, sum());
    if (rank == 2) {
      sum();  // announced, but never executed
      dead = true;
      return;
    }
    while (!dead) yield_core();
    const auto ticket = sum();
    if (shared || torn) CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
    engine.abort();  // as the group does after a death
    engine.exclude(2);
    const auto result = engine.wait(ticket, 20 * kSecond);
    CHECK(result.outcome == (torn ? Outcome::torn : Outcome::finished));
    if (torn) CHECK(result.first == 2);
    if (!torn) CHECK(buffer[count - 1] == 3);
    finish(engine, sum());
    CHECK(buffer[0] == 2 && buffer[count - 1] == 2);
    CHECK((engine.members() == std::vector<int>{0, 1}));
  });
}

// The same for a tree, which cannot run without it later.
void test_exclude_in_tree(std::size_t count, bool torn) {
  std::atomic<bool> dead{false};
  run(3, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 2 * count, true);
    const auto sum = [&] {
      buffer.fill_floats(1.0f);
      return engine.issue(tree_sum(buffer.bytes(), count, 3));
    };
    finish(engine, sum());
    if (rank == 2) {
      sum();  // announced, but never executed
      dead = true;
      return;
    }
    while (!dead) yield_core();
    const auto ticket = sum();
    if (torn) CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
    engine.abort();
    engine.exclude(2);
    const auto result = engine.wait(ticket, 20 * kSecond);
    CHECK(result.outcome == (torn ? Outcome::torn : Outcome::finished));
    if (torn) CHECK(result.first == 2);
    if (!torn) CHECK(buffer.holds_slots(3.0f, 1.0f));
    for (std::size_t i = count; i < 2 * count; ++i) CHECK(buffer[i] == std::bit_cast<int>(1.0f));
    const auto next = engine.wait(sum(), 20 * kSecond);
    CHECK(next.outcome == Outcome::root_left && next.first == 2);
    barrier(engine);
  });
}

void test_mismatch_and_timeout() {
  run(2, [](Engine& engine, int rank) {
    Buffer buffer(engine, rank == 0 ? 4u : 5u, false);
    const auto result = engine.wait(engine.issue(in_place(Collective::allreduce, buffer)), 20 * kSecond);
    CHECK(result.outcome == Outcome::mismatch);
    CHECK(result.first == 0 && result.second == 1);
  });
  run(2, [](Engine& engine, int rank) {
    if (rank == 1) return;
    Buffer buffer(engine, 4, false);
    const auto ticket = engine.issue(in_place(Collective::allreduce, buffer));
    CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
    engine.abort();
    CHECK(engine.wait(ticket, 20 * kSecond).outcome == Outcome::aborted);
  });
}

// A death is detected even if a lower rank is alive and late.
void test_death_behind_late_rank() {
  run(3, [](Engine& engine, int rank) {
    if (rank != 0) return;
    mark_dead(engine, 2);
    Buffer buffer(engine, 4, false);
    const auto ticket = engine.issue(in_place(Collective::allreduce, buffer));
    const auto result = engine.wait(ticket, 20 * kSecond);
    CHECK(result.outcome == Outcome::dead);
    CHECK(result.first == 2);
  });
}

// An abort ends the wait for a transfer.
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

// A late rank does not write to the buffer of a rank that has aborted the call.
void test_aborted_buffer_is_not_written() {
  std::atomic<bool> arrived{false}, aborted{false}, checked{false};
  run(2, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 1000, true);
    buffer.fill(1);
    if (rank == 0) {
      while (!arrived) yield_core();
      const auto ticket = engine.issue(in_place(Collective::allreduce, buffer));
      CHECK(engine.wait(ticket, kSecond / 50).outcome == Outcome::pending);
      engine.abort();
      buffer.fill(5);
      aborted = true;
      while (!checked) yield_core();
      bool right = true;
      for (std::size_t i = 0; i < 1000; ++i) right = right && buffer[i] == 5;
      CHECK(right);
    } else {
      const auto ticket = engine.issue(in_place(Collective::allreduce, buffer));
      arrived = true;
      while (!aborted) yield_core();
      CHECK(engine.wait(ticket, kSecond / 20).outcome == Outcome::pending);
      checked = true;
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

// Lengths and offsets that are not whole cache lines.
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

void test_adaptive_copier() {
  AdaptiveCopier copier;
  std::vector<char> from(40'000), into(40'000);
  for (int turn = 0; turn < 200; ++turn) {
    std::fill(from.begin(), from.end(), static_cast<char>(turn));
    const std::size_t length = turn % 3 == 0 ? 100 : from.size();
    copier.copy(into.data(), from.data(), length);
    CHECK(std::equal(from.begin(), from.begin() + static_cast<long>(length), into.begin()));
  }
}

// A root that dies after it has announced a broadcast tears it where it was to store a part into the
// receivers' buffers; otherwise the receivers finish.
void test_dead_root(bool shared) {
  std::atomic<bool> dead{false};
  run(3, [&](Engine& engine, int rank) {
    Buffer buffer(engine, 300, shared || rank == 2);
    buffer.fill(rank);
    if (rank == 2) {
      engine.issue(in_place(Collective::broadcast, buffer, 2));
      dead = true;
      return;
    }
    while (!dead) yield_core();
    const auto ticket = engine.issue(in_place(Collective::broadcast, buffer, 2));
    engine.exclude(2);
    const auto result = engine.wait(ticket, 20 * kSecond);
    CHECK(result.outcome == (shared ? Outcome::torn : Outcome::finished));
    CHECK(buffer[0] == 2 && (shared || buffer[299] == 2));
    finish(engine, engine.issue(in_place(Collective::broadcast, buffer, 1)));
  });
}

void test_all_modes() {
  for (const int ranks : {1, 2, 3, 5}) {
    test_allreduce(ranks);
    test_ordered_allreduce(ranks);
    test_asynchronous(ranks);
    test_try_issue(ranks);
    test_broadcast_and_reduce(ranks);
    test_allgather_and_reduce_scatter(ranks);
    test_alltoall(ranks);
  }
  test_try_issue_on_failed_engine();
  test_alltoall_size_mismatch();
  test_transfers();
  test_leave();
  test_leave_with_operations_in_flight();
  test_root_that_left();
  test_tree_without_rank(false);
  test_tree_without_rank(true);
  test_tree_mismatch();
  test_mismatch_and_timeout();
  test_death_behind_late_rank();
  test_abort_ends_transfers();
}

// These need a rank 2 without a driver.
void test_deaths() {
  test_exclude(10, false, false);  // small: its input is in its slot
  test_exclude(300, true, true);   // its slice is missing
  test_exclude(300, false, true);  // its windows are empty
  test_exclude_in_tree(10, false);
  test_exclude_in_tree(300, true);
  test_dead_root(true);
  test_dead_root(false);
}

}  // namespace

int main() {
  for (const DriverMode by : {DriverMode::callers, DriverMode::threads, DriverMode::mixed}) {
    driver_mode = by;
    test_all_modes();
    if (by != DriverMode::threads) test_deaths();
  }
  driver_mode = DriverMode::callers;  // these need ranks without a driver
  test_tree_errors();
  test_uneven_alltoall();
  test_aborted_buffer_is_not_written();
  test_streamed_copies();
  test_adaptive_copier();
  test_wrong_region();
  return report();
}
