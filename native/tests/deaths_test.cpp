// Ranks that give up, die or are stopped at any point of direct operations: survivors come to the same
// end, and nobody touches the buffers of who has given up.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <string>

#include "harness.hpp"

namespace {

// -- interleavings ----------------------------------------------------------------------------------
//
// All ranks are engines of one thread, which takes a step of one rank at a time, in an order that a
// seed decides. What each step does is what a group does: survivors who hear of a death give up,
// and go on without the dead some time later; some of those who are to die give up first, and use
// their buffers for something else.

constexpr int kSize = 4;
constexpr std::size_t kOperations = 6;
constexpr std::size_t kRoom = 16384;  // bytes in a slab for each operation

struct Call {
  Kind kind = Kind::allreduce;
  int root = 0;
  std::size_t count = 0;
  bool shared[kSize] = {};
};

int brought(int rank, std::size_t call) { return (rank + 1) * 100 + static_cast<int>(call); }
constexpr int kGarbage = -77'777;

class Rank {
 public:
  Rank(const Region& region, int rank, const std::vector<Call>& calls)
      : rank_(rank), calls_(calls), engine(region.alias(), rank, kSize) {
    for (std::size_t call = 0; call < calls.size(); ++call) {
      inputs_.emplace_back(engine, calls[call].count, calls[call].shared[rank], call * kRoom);
      inputs_.back().fill(brought(rank, call));
      outputs_.emplace_back(calls[call].count * kSize, 0);
    }
  }

  void issue() {
    const std::size_t call = tickets.size();
    Request request = in_place(calls_[call].kind, inputs_[call], calls_[call].root);
    const std::size_t count = calls_[call].count;
    if (calls_[call].kind == Kind::allgather) {
      request.outputs.clear();
      for (std::size_t r = 0; r < kSize; ++r)
        request.outputs.push_back(reinterpret_cast<char*>(outputs_[call].data() + r * count));
    }
    if (calls_[call].kind == Kind::scatter) {
      const std::size_t part = count / kSize * sizeof(int);
      if (rank_ != calls_[call].root) request.bytes = 0;
      request.outputs = {reinterpret_cast<char*>(outputs_[call].data())};
      request.output_bytes = request.extent = part;
    }
    tickets.push_back(engine.issue(std::move(request)));
  }

  void use_buffers_for_something_else() {
    for (std::size_t call = 0; call < tickets.size(); ++call)
      if (engine.test(tickets[call]).outcome != Outcome::finished) inputs_[call].fill(kGarbage);
  }

  // Whether a call that ended well has the right result, given who took part in it.
  bool is_right(std::size_t call, const std::set<int>& members) {
    Buffer& input = inputs_[call];
    const Call& of = calls_[call];
    int sum = 0;
    for (const int rank : members) sum += brought(rank, call);
    switch (of.kind) {
      case Kind::allreduce:
        return input.holds(sum);
      case Kind::reduce:
        return input.holds(rank_ == of.root ? sum : brought(rank_, call));
      case Kind::broadcast:
        return input.holds(brought(of.root, call));
      case Kind::scatter:
        return std::all_of(outputs_[call].begin(),
                           outputs_[call].begin() + static_cast<long>(of.count / kSize),
                           [&](int value) { return value == brought(of.root, call); });
      case Kind::allgather:
        for (const int rank : members)
          for (std::size_t i = 0; i < of.count; ++i)
            if (outputs_[call][static_cast<std::size_t>(rank) * of.count + i] !=
                brought(rank, call))
              return false;
        return true;
      default:
        return true;
    }
  }

  bool alive = true;
  bool gave_up = false;
  std::set<int> forgotten;
  std::vector<std::uint64_t> tickets;

 private:
  const int rank_;
  const std::vector<Call>& calls_;
  std::vector<Buffer> inputs_;
  std::vector<std::vector<int>> outputs_;

 public:
  Engine engine;  // ends first
};

class World {
 public:
  explicit World(unsigned seed) : seed_(seed), chance_(seed) {
    constexpr Kind kinds[] = {Kind::allreduce, Kind::allreduce, Kind::broadcast,
                              Kind::allgather, Kind::reduce,    Kind::scatter};
    constexpr std::size_t kCounts[] = {4, 100, 400};
    for (std::size_t i = 0; i < kOperations; ++i) {
      Call& call = calls_.emplace_back();
      call.kind = kinds[below(std::size(kinds))];
      call.root = static_cast<int>(below(kSize));
      call.count = kCounts[below(std::size(kCounts))];
      const bool all_shared = below(3) != 0;
      for (bool& shared : call.shared) shared = all_shared || below(2) == 0;
    }
    for (int rank = 0; rank < kSize; ++rank)
      ranks_.push_back(std::make_unique<Rank>(region_, rank, calls_));
    std::vector<int> order{0, 1, 2, 3};
    std::shuffle(order.begin(), order.end(), chance_);
    victims_.insert(order.begin(), order.begin() + 1 + static_cast<long>(below(2)));
  }

  void run() {
    for (int step = 0; step < 400 && !is_over(); ++step)
      take_step(static_cast<int>(below(kSize)), below(4) == 0);
    for (const int rank : victims_)
      if (ranks_[static_cast<std::size_t>(rank)]->alive) die(rank);
    for (int step = 0; step < 400 && !is_over(); ++step)
      for (int rank = 0; rank < kSize; ++rank) take_step(rank, true);
    compare();
  }

 private:
  std::size_t below(std::size_t limit) { return chance_() % limit; }
  Rank& at(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }

  // `patient`: waits rather than looks, and so finds out who is dead.
  void take_step(int number, bool patient) {
    Rank& rank = at(number);
    if (!rank.alive) return;
    const bool victim = victims_.count(number) != 0;
    if (victim && below(12) == 0) return die(number);
    if (rank.gave_up) {
      if (!victim && !dead_.empty() && below(3) == 0) go_on(rank);
      return;
    }
    if (victim && below(15) == 0) return give_up(rank, true);
    if (rank.tickets.size() < kOperations && (below(2) == 0 || rank.tickets.empty()))
      return rank.issue();
    const std::uint64_t last = rank.tickets.back();
    const Verdict verdict = patient ? rank.engine.wait(last, 1) : rank.engine.test(last);
    if (verdict.outcome == Outcome::dead) give_up(rank, victim);
  }

  void give_up(Rank& rank, bool for_good) {
    rank.engine.abort();
    rank.gave_up = true;
    if (for_good) rank.use_buffers_for_something_else();
  }

  void go_on(Rank& rank) {
    for (const int lost : dead_) rank.engine.forget(lost);
    rank.forgotten = dead_;
    rank.gave_up = false;
  }

  void die(int rank) {
    at(rank).alive = false;
    dead_.insert(rank);
    for (int other = 0; other < kSize; ++other)
      if (at(other).alive) take_for_dead(at(other).engine, rank);
  }

  bool is_over() {
    bool over = dead_ == victims_;
    for (int number = 0; number < kSize; ++number) {
      Rank& rank = at(number);
      if (!rank.alive) continue;
      over = over && !rank.gave_up && rank.tickets.size() == kOperations &&
             rank.engine.test(rank.tickets.back()).outcome != Outcome::pending &&
             rank.engine.test(rank.tickets.back()).outcome != Outcome::dead;
    }
    return over;
  }

  void compare() {
    bool alike = true, right = true, ended = is_over();
    for (std::size_t call = 0; ended && call < kOperations; ++call) {
      std::set<Outcome> outcomes;
      std::set<int> named, members;
      for (int rank = 0; rank < kSize; ++rank)
        if (region_.control(rank).arrived.read() > call) members.insert(rank);
      for (int rank = 0; rank < kSize; ++rank) {
        if (!at(rank).alive) continue;
        const Verdict verdict = at(rank).engine.test(at(rank).tickets[call]);
        outcomes.insert(verdict.outcome);
        named.insert(verdict.first);
        if (verdict.outcome == Outcome::finished)
          right = right && at(rank).is_right(call, members);
        else
          ++torn;
      }
      alike = alike && outcomes.size() == 1 && named.size() == 1;
    }
    CHECK(ended);
    CHECK(alike);
    CHECK(right);
    if (!ended || !alike || !right) std::printf("in the order of seed %u\n", seed_);
  }

  const unsigned seed_;
  std::mt19937 chance_;
  Region region_ = Region::create("memfd", kSize, tiny());
  std::vector<Call> calls_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::set<int> victims_, dead_;

 public:
  static inline long torn = 0;
};

void test_survivors_agree(unsigned orders) {
  World::torn = 0;
  for (unsigned seed = 0; seed < orders; ++seed) World(seed).run();
  CHECK(World::torn > 0);
}

// A call that all have done stays done: rank 3 gives up and dies later, after one who has seen the end
// of the call and before one who has not.
void test_a_completed_call_is_not_torn(Kind kind) {
  Region region = Region::create("memfd", kSize, tiny());
  std::vector<Call> calls(2);
  for (Call& call : calls) call = {kind, 3, 400, {true, true, true, true}};
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < kSize; ++rank)
    ranks.push_back(std::make_unique<Rank>(region, rank, calls));
  for (const std::size_t rank : {0u, 2u, 3u, 1u}) ranks[rank]->issue();  // the last does its share
  for (const std::size_t rank : {0u, 2u, 3u}) ranks[rank]->engine.test(1);
  for (const std::size_t rank : {0u, 2u, 3u}) finish(ranks[rank]->engine, 1);
  for (const std::size_t rank : {0u, 1u, 3u}) take_for_dead(ranks[rank]->engine, 2);
  ranks[3]->issue();
  CHECK(ranks[3]->engine.wait(2, 1).outcome == Outcome::dead);
  ranks[3]->engine.abort();
  ranks[3]->use_buffers_for_something_else();
  for (const std::size_t rank : {0u, 1u}) {
    take_for_dead(ranks[rank]->engine, 3);
    ranks[rank]->engine.abort();
    ranks[rank]->engine.forget(2);
    ranks[rank]->engine.forget(3);
    finish(ranks[rank]->engine, 1);
    CHECK(ranks[rank]->is_right(0, {0, 1, 2, 3}));
  }
}

// Nobody ends a call well that another may not: rank 3 gives up when one has done its share and the
// other has not.
void test_a_call_is_torn_for_all(Kind kind) {
  Region region = Region::create("memfd", kSize, tiny());
  std::vector<Call> calls(1, {kind, 3, 400, {true, true, true, true}});
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < kSize; ++rank)
    ranks.push_back(std::make_unique<Rank>(region, rank, calls));
  for (const std::size_t rank : {3u, 2u, 1u, 0u}) ranks[rank]->issue();  // the last does its share
  for (const std::size_t rank : {0u, 2u, 3u})
    CHECK(ranks[rank]->engine.test(1).outcome == Outcome::pending);
  ranks[3]->engine.abort();
  ranks[3]->use_buffers_for_something_else();
  CHECK(ranks[1]->engine.test(1).outcome == Outcome::pending);
  for (const std::size_t rank : {2u, 1u, 0u}) {
    take_for_dead(ranks[rank]->engine, 3);
    ranks[rank]->engine.abort();
    ranks[rank]->engine.forget(3);
    ranks[rank]->engine.test(1);
  }
  for (const std::size_t rank : {0u, 1u, 2u}) {
    const Verdict verdict = ranks[rank]->engine.test(1);
    CHECK(verdict.outcome == Outcome::torn && verdict.first == 3);
  }
}

// Two are lost in a broadcast through windows, the root among them, and it is not the last of them.
void test_a_root_is_missed_among_others() {
  Region region = Region::create("memfd", kSize, tiny());
  std::vector<Call> calls(1, {Kind::broadcast, 0, 400, {}});
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < kSize; ++rank)
    ranks.push_back(std::make_unique<Rank>(region, rank, calls));
  for (const auto& rank : ranks) rank->issue();
  for (const std::size_t rank : {1u, 3u})
    for (const int lost : {0, 2}) ranks[rank]->engine.forget(lost);
  for (int turn = 0; turn < 20; ++turn)
    for (const std::size_t rank : {1u, 3u}) ranks[rank]->engine.test(1);
  for (const std::size_t rank : {1u, 3u}) {
    const Verdict verdict = ranks[rank]->engine.test(1);
    CHECK(verdict.outcome == Outcome::torn && verdict.first == 0);
  }
}

// -- stopped in the middle --------------------------------------------------------------------------

// Rank 1 is stopped in the middle of its share. Rank 0 gives up meanwhile and uses its buffer for
// something else. When rank 1 goes on, it ends the piece at hand and leaves the rest alone.
void test_who_was_stopped_goes_no_further_than_a_piece(Kind kind) {
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
  const auto ticket = zero.issue(in_place(kind, mine, 1));
  // The second half is rank 1's to store, in either kind, and page 12 is in it.
  constexpr std::size_t kAt = 12 * kInPage;
  Trap trap(theirs.bytes() + kAt * sizeof(int));
  std::uint64_t other = 0;
  std::thread peer([&] { other = one.issue(in_place(kind, theirs, 1)); });
  trap.await();
  CHECK(zero.is_untouched());
  zero.abort();  // which waits, but not for ever
  CHECK(!zero.is_untouched());
  for (std::size_t i = 0; i < kInts; ++i)
    if (i < kAt || i >= kAt + kInPiece) mine[i] = 5;
  trap.let_go();
  peer.join();
  CHECK(!trap.outlasted());
  CHECK(zero.is_untouched());
  bool right = true;
  for (std::size_t i = 0; i < kInts; ++i)
    right = right && (mine[i] == 5 || (i >= kAt && i < kAt + kInPiece));
  CHECK(right);
  CHECK(zero.test(ticket).outcome == Outcome::aborted);
  CHECK(one.test(other).outcome == Outcome::pending);
}

// The same, but rank 0 goes on in the end, its buffer as it was: nothing is added twice or left out.
void test_a_share_is_taken_up_where_it_was_left(Kind kind) {
  std::atomic<bool> gave_up{false};
  run(3, [&](Engine& engine, int rank) {
    if (rank == 2) return;  // whose death is the reason
    Buffer buffer(engine, 4096, true);
    for (std::size_t i = 0; i < 4096; ++i) buffer[i] = static_cast<int>(i) * (rank + 1);
    engine.forget(2);
    const auto ticket = engine.issue(in_place(kind, buffer, 1));
    if (rank == 0) {
      for (int turn = 0; turn < 20; ++turn) {
        engine.test(ticket);
        engine.abort();
        yield_core();
        engine.forget(2);
      }
      gave_up = true;
    } else {
      while (!gave_up) engine.test(ticket);
    }
    finish(engine, ticket);
    bool right = true;
    const int times = kind == Kind::allreduce ? 3 : 2;
    for (std::size_t i = 0; i < 4096; ++i) right = right && buffer[i] == static_cast<int>(i) * times;
    CHECK(right);
  });
}

// Rank 0 gives up at any moment, and has its buffer to itself: ThreadSanitizer sees who touches it.
void test_a_buffer_is_its_owners_after_giving_up(Kind kind) {
  for (std::uint64_t turn = 0; turn < 30; ++turn) {
    std::atomic<bool> over{false};
    std::atomic<std::uint64_t> tries[3]{};
    run(3, [&](Engine& engine, int rank) {
      Buffer buffer(engine, 4000, true);
      buffer.fill(1);
      std::uint64_t ticket = engine.issue(in_place(kind, buffer, 1));
      const auto give_up_at = now_ns() + turn * 20'000;
      while (rank == 0 ? now_ns() < give_up_at : !over) {
        if (engine.test(ticket).outcome == Outcome::finished)
          ticket = engine.issue(in_place(kind, buffer, 1));
        ++tries[rank];
        if (rank != 0) yield_core();
      }
      engine.abort();
      if (rank != 0) return;
      if (engine.is_untouched()) {  // and not on a machine that had no time for a piece
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
  for (const Kind kind : {Kind::allreduce, Kind::broadcast, Kind::allgather, Kind::reduce, Kind::scatter}) {
    test_a_completed_call_is_not_torn(kind);
    test_a_call_is_torn_for_all(kind);
  }
  test_a_root_is_missed_among_others();
  for (const Kind kind : {Kind::allreduce, Kind::broadcast}) {
    test_who_was_stopped_goes_no_further_than_a_piece(kind);
    for (const Driven by : {Driven::by_callers, Driven::by_both}) {
      driven = by;
      test_a_share_is_taken_up_where_it_was_left(kind);
      test_a_buffer_is_its_owners_after_giving_up(kind);
    }
  }
  return tell();
}
