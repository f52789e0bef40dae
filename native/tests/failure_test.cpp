// Ranks that abort, die or are stopped at any point of an operation: survivors agree on its result, and
// no rank accesses the buffers of one that has aborted.

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <string>

#include "harness.hpp"

namespace {

// -- interleavings ----------------------------------------------------------------------------------
//
// All ranks run on one thread, one step at a time, in an order that depends on a seed. Steps do what a
// group does: survivors that detect a death abort and exclude the dead rank later; some victims abort
// before they die and overwrite their buffers.

constexpr int kSize = 4;
constexpr std::size_t kOperations = 6;
constexpr std::size_t kRoom = 16384;  // bytes in a slab for each operation

struct Call {
  Collective kind = Collective::allreduce;
  int root = 0;
  std::size_t count = 0;
  bool shared[kSize] = {};
};

int input_value(int rank, std::size_t call) { return (rank + 1) * 100 + static_cast<int>(call); }
constexpr int kGarbage = -77'777;

Request in_place_of(Collective kind, Buffer& buffer, int ranks) {
  if (kind == Collective::ordered_allreduce)
    return tree_sum(buffer.bytes(), buffer.size() / sizeof(float) / 2, ranks);
  return in_place(kind, buffer, 1);
}

// Two inputs of ranks 0 and 2, one of the others.
Request tree_of_four(Buffer& buffer, std::size_t count) {
  return tree_sum(buffer.bytes(), count / 3, count / 3, {2, 1, 2, 1}, {0, 1, 0, 0, 1, 3});
}

class Rank {
 public:
  Rank(const Region& region, int rank, const std::vector<Call>& calls)
      : rank_(rank), calls_(calls), engine(region.alias(), rank, kSize) {
    for (std::size_t call = 0; call < calls.size(); ++call) {
      inputs_.emplace_back(engine, calls[call].count, calls[call].shared[rank], call * kRoom);
      inputs_.back().fill(element(rank, call));
      outputs_.emplace_back(calls[call].count * kSize, 0);
    }
  }

  void issue() {
    const std::size_t call = tickets.size();
    Request request = in_place(calls_[call].kind, inputs_[call], calls_[call].root);
    const std::size_t count = calls_[call].count;
    if (calls_[call].kind == Collective::ordered_allreduce)
      request = tree_of_four(inputs_[call], count);
    if (calls_[call].kind == Collective::allgather) {
      request.outputs.clear();
      for (std::size_t r = 0; r < kSize; ++r)
        request.outputs.push_back(reinterpret_cast<char*>(outputs_[call].data() + r * count));
    }
    if (calls_[call].kind == Collective::scatter) {
      const std::size_t part = count / kSize * sizeof(int);
      if (rank_ != calls_[call].root) request.bytes = 0;
      request.outputs = {reinterpret_cast<char*>(outputs_[call].data())};
      request.output_bytes = request.fingerprint = part;
    }
    tickets.push_back(engine.issue(std::move(request)));
  }

  void overwrite_buffers() {
    for (std::size_t call = 0; call < tickets.size(); ++call)
      if (engine.test(tickets[call]).outcome != Outcome::finished) inputs_[call].fill(kGarbage);
  }

  // Whether a finished call has the correct result, given its members.
  bool is_correct(std::size_t call, const std::set<int>& members) {
    Buffer& input = inputs_[call];
    const Call& of = calls_[call];
    int sum = 0;
    for (const int rank : members) sum += input_value(rank, call);
    switch (of.kind) {
      case Collective::allreduce:
        return input.holds(sum);
      case Collective::reduce:
        return input.holds(rank_ == of.root ? sum : input_value(rank_, call));
      case Collective::broadcast:
        return input.holds(input_value(of.root, call));
      case Collective::scatter:
        return std::all_of(outputs_[call].begin(),
                           outputs_[call].begin() + static_cast<long>(of.count / kSize),
                           [&](int value) { return value == input_value(of.root, call); });
      case Collective::allgather:
        for (const int rank : members)
          for (std::size_t i = 0; i < of.count; ++i)
            if (outputs_[call][static_cast<std::size_t>(rank) * of.count + i] !=
                input_value(rank, call))
              return false;
        return true;
      case Collective::ordered_allreduce:
        return members.size() == kSize && is_tree_sum(call, sum);
      default:
        return true;
    }
  }

  // Whether the inputs of a tree are as they were, even if a death has torn it.
  bool has_tree_inputs(std::size_t call) {
    if (calls_[call].kind != Collective::ordered_allreduce) return true;
    for (std::size_t i = calls_[call].count / 3; i < calls_[call].count; ++i)
      if (inputs_[call][i] != element(rank_, call)) return false;
    return true;
  }

  bool alive = true;
  bool aborted = false;
  std::set<int> detached;
  std::vector<std::uint64_t> tickets;

 private:
  int element(int rank, std::size_t call) const {
    const int value = input_value(rank, call);
    return calls_[call].kind == Collective::ordered_allreduce
               ? std::bit_cast<int>(static_cast<float>(value))
               : value;
  }

  // Given the sum of one input per rank.
  bool is_tree_sum(std::size_t call, int sum) {
    const int all = sum + input_value(0, call) + input_value(2, call);
    for (std::size_t i = 0; i < calls_[call].count / 3; ++i)
      if (inputs_[call][i] != std::bit_cast<int>(static_cast<float>(all))) return false;
    return has_tree_inputs(call);
  }

  const int rank_;
  const std::vector<Call>& calls_;
  std::vector<Buffer> inputs_;
  std::vector<std::vector<int>> outputs_;

 public:
  Engine engine;  // destroyed first
};

using Ranks = std::vector<std::unique_ptr<Rank>>;

Ranks make_ranks(const Region& region, const std::vector<Call>& calls) {
  Ranks ranks;
  for (int rank = 0; rank < kSize; ++rank)
    ranks.push_back(std::make_unique<Rank>(region, rank, calls));
  return ranks;
}

class Simulation {
 public:
  explicit Simulation(unsigned seed) : seed_(seed), random_(seed) {
    constexpr Collective kinds[] = {Collective::allreduce, Collective::allreduce,
                                    Collective::broadcast, Collective::allgather,
                                    Collective::reduce,    Collective::scatter,
                                    Collective::ordered_allreduce};
    constexpr std::size_t kCounts[] = {4, 100, 400};
    for (std::size_t i = 0; i < kOperations; ++i) {
      Call& call = calls_.emplace_back();
      call.kind = kinds[below(std::size(kinds))];
      call.root = static_cast<int>(below(kSize));
      call.count = kCounts[below(std::size(kCounts))];
      const bool all_shared = below(3) != 0 || call.kind == Collective::ordered_allreduce;
      for (bool& shared : call.shared) shared = all_shared || below(2) == 0;
    }
    ranks_ = make_ranks(region_, calls_);
    std::vector<int> order{0, 1, 2, 3};
    std::shuffle(order.begin(), order.end(), random_);
    victims_.insert(order.begin(), order.begin() + 1 + static_cast<long>(below(2)));
  }

  void run() {
    for (int i = 0; i < 400 && !is_over(); ++i)
      step(static_cast<int>(below(kSize)), below(4) == 0);
    for (const int rank : victims_)
      if (ranks_[static_cast<std::size_t>(rank)]->alive) die(rank);
    for (int i = 0; i < 400 && !is_over(); ++i)
      for (int rank = 0; rank < kSize; ++rank) step(rank, true);
    compare();
  }

 private:
  std::size_t below(std::size_t limit) { return random_() % limit; }
  Rank& at(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }

  // Deaths are detected only by steps that wait.
  void step(int number, bool waits) {
    Rank& rank = at(number);
    if (!rank.alive) return;
    const bool victim = victims_.count(number) != 0;
    if (victim && below(12) == 0) return die(number);
    if (rank.aborted) {
      if (!victim && !dead_.empty() && below(3) == 0) exclude_dead(rank);
      return;
    }
    if (victim && below(15) == 0) return abort(rank, true);
    if (rank.tickets.size() < kOperations && (below(2) == 0 || rank.tickets.empty()))
      return rank.issue();
    const std::uint64_t last = rank.tickets.back();
    const Result result = waits ? rank.engine.wait(last, 1) : rank.engine.test(last);
    if (result.outcome == Outcome::dead) abort(rank, victim);
  }

  void abort(Rank& rank, bool for_good) {
    rank.engine.abort();
    rank.aborted = true;
    if (for_good) rank.overwrite_buffers();
  }

  void exclude_dead(Rank& rank) {
    for (const int lost : dead_) rank.engine.exclude(lost);
    rank.detached = dead_;
    rank.aborted = false;
  }

  void die(int rank) {
    at(rank).alive = false;
    dead_.insert(rank);
    for (int other = 0; other < kSize; ++other)
      if (at(other).alive) mark_dead(at(other).engine, rank);
  }

  bool is_over() {
    bool over = dead_ == victims_;
    for (int number = 0; number < kSize; ++number) {
      Rank& rank = at(number);
      if (!rank.alive) continue;
      over = over && !rank.aborted && rank.tickets.size() == kOperations &&
             rank.engine.test(rank.tickets.back()).outcome != Outcome::pending &&
             rank.engine.test(rank.tickets.back()).outcome != Outcome::dead;
    }
    return over;
  }

  void compare() {
    bool agree = true, right = true, ended = is_over();
    for (std::size_t call = 0; ended && call < kOperations; ++call) {
      std::set<Outcome> outcomes;
      std::set<int> named, members;
      for (int rank = 0; rank < kSize; ++rank)
        if (region_.control(rank).arrived.read() > call) members.insert(rank);
      for (int rank = 0; rank < kSize; ++rank) {
        if (!at(rank).alive) continue;
        const Result result = at(rank).engine.test(at(rank).tickets[call]);
        outcomes.insert(result.outcome);
        named.insert(result.first);
        if (result.outcome == Outcome::finished)
          right = right && at(rank).is_correct(call, members);
        else
          ++torn;
        right = right && at(rank).has_tree_inputs(call);
      }
      agree = agree && outcomes.size() == 1 && named.size() == 1;
    }
    CHECK(ended);
    CHECK(agree);
    CHECK(right);
    if (!ended || !agree || !right) std::printf("with seed %u\n", seed_);
  }

  const unsigned seed_;
  std::mt19937 random_;
  Region region_ = Region::create("memfd", kSize, tiny());
  std::vector<Call> calls_;
  Ranks ranks_;
  std::set<int> victims_, dead_;

 public:
  static inline long torn = 0;
};

void test_survivors_agree(unsigned orders) {
  Simulation::torn = 0;
  for (unsigned seed = 0; seed < orders; ++seed) Simulation(seed).run();
  CHECK(Simulation::torn > 0);
}

// An operation that all ranks have executed is not torn when rank 3 aborts and dies later, between the
// finish on one survivor and on another.
void test_completed_operation_is_not_torn(Collective kind) {
  Region region = Region::create("memfd", kSize, tiny());
  std::vector<Call> calls(2);
  for (Call& call : calls) call = {kind, 3, 400, {true, true, true, true}};
  const Ranks ranks = make_ranks(region, calls);
  for (const std::size_t rank : {0u, 2u, 3u, 1u}) ranks[rank]->issue();  // the last one executes
  for (const std::size_t rank : {0u, 2u, 3u}) ranks[rank]->engine.test(1);
  for (const std::size_t rank : {0u, 2u, 3u}) finish(ranks[rank]->engine, 1);
  for (const std::size_t rank : {0u, 1u, 3u}) mark_dead(ranks[rank]->engine, 2);
  ranks[3]->issue();
  CHECK(ranks[3]->engine.wait(2, 1).outcome == Outcome::dead);
  ranks[3]->engine.abort();
  ranks[3]->overwrite_buffers();
  for (const std::size_t rank : {0u, 1u}) {
    mark_dead(ranks[rank]->engine, 3);
    ranks[rank]->engine.abort();
    ranks[rank]->engine.exclude(2);
    ranks[rank]->engine.exclude(3);
    finish(ranks[rank]->engine, 1);
    CHECK(ranks[rank]->is_correct(0, {0, 1, 2, 3}));
  }
}

// Rank 3 aborts when one survivor has executed the operation and another has not.
void test_torn_on_all_survivors(Collective kind) {
  Region region = Region::create("memfd", kSize, tiny());
  std::vector<Call> calls(1, {kind, 3, 400, {true, true, true, true}});
  const Ranks ranks = make_ranks(region, calls);
  for (const std::size_t rank : {3u, 2u, 1u, 0u}) ranks[rank]->issue();  // the last one executes
  for (const std::size_t rank : {0u, 2u, 3u})
    CHECK(ranks[rank]->engine.test(1).outcome == Outcome::pending);
  ranks[3]->engine.abort();
  ranks[3]->overwrite_buffers();
  CHECK(ranks[1]->engine.test(1).outcome == Outcome::pending);
  for (const std::size_t rank : {2u, 1u, 0u}) {
    mark_dead(ranks[rank]->engine, 3);
    ranks[rank]->engine.abort();
    ranks[rank]->engine.exclude(3);
    ranks[rank]->engine.test(1);
  }
  for (const std::size_t rank : {0u, 1u, 2u}) {
    const Result result = ranks[rank]->engine.test(1);
    CHECK(result.outcome == Outcome::torn && result.first == 3);
    CHECK(ranks[rank]->has_tree_inputs(0));
  }
}

// Two ranks die in a broadcast through windows; the root is not the last of them.
void test_dead_root_among_dead_ranks() {
  Region region = Region::create("memfd", kSize, tiny());
  std::vector<Call> calls(1, {Collective::broadcast, 0, 400, {}});
  const Ranks ranks = make_ranks(region, calls);
  for (const auto& rank : ranks) rank->issue();
  for (const std::size_t rank : {1u, 3u})
    for (const int lost : {0, 2}) ranks[rank]->engine.exclude(lost);
  for (int turn = 0; turn < 20; ++turn)
    for (const std::size_t rank : {1u, 3u}) ranks[rank]->engine.test(1);
  for (const std::size_t rank : {1u, 3u}) {
    const Result result = ranks[rank]->engine.test(1);
    CHECK(result.outcome == Outcome::torn && result.first == 0);
  }
}

// -- stopped in the middle --------------------------------------------------------------------------

// Rank 1 is stopped in the middle of an operation. Rank 0 aborts meanwhile and overwrites its buffer. When
// rank 1 continues, it completes the current piece and does not access the rest.
void test_stopped_rank_ends_with_its_piece(Collective kind) {
  constexpr std::size_t kPages = 16;
  constexpr std::size_t kInts = kPages * Trap::kBytes / sizeof(int);
  constexpr std::size_t kInPage = Trap::kBytes / sizeof(int);
  Sizes sizes = tiny();
  sizes.piece = 1024;
  constexpr std::size_t kInPiece = 1024 / sizeof(int);
  Region region = Region::create("memfd", 2, sizes);
  Engine zero(region.alias(), 0, 2), one(region.alias(), 1, 2);
  const std::size_t misaligned =
      reinterpret_cast<std::uintptr_t>(region.bytes(region.layout().slab(1))) % Trap::kBytes;
  CHECK(misaligned == 0);
  Buffer mine(zero, kInts, true), theirs(one, kInts, true);
  mine.fill(1);
  theirs.fill(2);
  const auto ticket = zero.issue(in_place_of(kind, mine, 2));
  // Rank 1 stores the second half in all these collectives; page 12 is in it. Of a tree that is the second
  // half of the result, which is half of the buffer, and page 12 is the input of its first page.
  constexpr std::size_t kAt = 12 * kInPage;
  const bool is_tree = kind == Collective::ordered_allreduce;
  const std::size_t stored = is_tree ? kAt - kInts / 2 : kAt;
  const auto in_piece = [](std::size_t i, std::size_t at) { return i >= at && i < at + kInPiece; };
  Trap trap(theirs.bytes() + kAt * sizeof(int));
  std::uint64_t other = 0;
  std::thread peer([&] { other = one.issue(in_place_of(kind, theirs, 2)); });
  trap.wait_until_caught();
  CHECK(zero.is_quiescent());
  zero.abort();  // waits until its timeout
  CHECK(!zero.is_quiescent());
  for (std::size_t i = 0; i < kInts; ++i)
    if (!in_piece(i, kAt) && !in_piece(i, stored)) mine[i] = 5;
  trap.release();
  peer.join();
  CHECK(!trap.timed_out());
  CHECK(zero.is_quiescent());
  bool right = true;
  for (std::size_t i = 0; i < kInts; ++i)
    right = right && (mine[i] == 5 || in_piece(i, stored) || (mine[i] == 1 && in_piece(i, kAt)));
  CHECK(right);
  CHECK(zero.test(ticket).outcome == Outcome::aborted);
  CHECK(one.test(other).outcome == Outcome::pending);
}

// Rank 0 aborts and resumes repeatedly, with its buffer unchanged: nothing is reduced twice or left out.
void test_resume_after_abort(Collective kind) {
  std::atomic<bool> aborted{false};
  run(3, [&](Engine& engine, int rank) {
    if (rank == 2) return;  // plays the dead rank
    Buffer buffer(engine, 4096, true);
    for (std::size_t i = 0; i < 4096; ++i) buffer[i] = static_cast<int>(i) * (rank + 1);
    engine.exclude(2);
    const auto ticket = engine.issue(in_place(kind, buffer, 1));
    if (rank == 0) {
      for (int turn = 0; turn < 20; ++turn) {
        engine.test(ticket);
        engine.abort();
        yield_core();
        engine.exclude(2);
      }
      aborted = true;
    } else {
      while (!aborted) engine.test(ticket);
    }
    finish(engine, ticket);
    bool right = true;
    const int times = kind == Collective::allreduce ? 3 : 2;
    for (std::size_t i = 0; i < 4096; ++i) right = right && buffer[i] == static_cast<int>(i) * times;
    CHECK(right);
  });
}

// Rank 0 aborts at any time and owns its buffer: ThreadSanitizer reports an access.
void test_aborted_buffer_is_not_accessed(Collective kind) {
  for (std::uint64_t turn = 0; turn < 30; ++turn) {
    std::atomic<bool> over{false};
    std::atomic<std::uint64_t> tries[3]{};
    run(3, [&](Engine& engine, int rank) {
      Buffer buffer(engine, 4000, true);
      buffer.fill(1);
      std::uint64_t ticket = engine.issue(in_place_of(kind, buffer, 3));
      const auto abort_at = now_ns() + turn * 20'000;
      while (rank == 0 ? now_ns() < abort_at : !over) {
        if (engine.test(ticket).outcome == Outcome::finished)
          ticket = engine.issue(in_place_of(kind, buffer, 3));
        ++tries[rank];
        if (rank != 0) yield_core();
      }
      engine.abort();
      if (rank != 0) return;
      if (engine.is_quiescent()) {  // false if the machine was too busy to finish a piece in time
        buffer.fill(kGarbage);
        for (const int other : {1, 2}) {
          const std::uint64_t seen = tries[other];
          while (tries[other] < seen + 3) yield_core();
        }
        CHECK(buffer.holds(kGarbage));
      }
      over = true;
    });
  }
}

}  // namespace

int main(int count, char** values) {
  test_survivors_agree(count > 1 ? static_cast<unsigned>(std::atoi(values[1])) : 300);
  for (const Collective kind : {Collective::allreduce, Collective::broadcast, Collective::allgather,
                                Collective::reduce, Collective::scatter,
                                Collective::ordered_allreduce}) {
    test_completed_operation_is_not_torn(kind);
    test_torn_on_all_survivors(kind);
  }
  test_dead_root_among_dead_ranks();
  for (const Collective kind :
       {Collective::allreduce, Collective::broadcast, Collective::ordered_allreduce}) {
    test_stopped_rank_ends_with_its_piece(kind);
    for (const DriverMode by : {DriverMode::callers, DriverMode::mixed}) {
      driver_mode = by;
      if (kind != Collective::ordered_allreduce) test_resume_after_abort(kind);  // it needs every rank
      test_aborted_buffer_is_not_accessed(kind);
    }
  }
  return report();
}
