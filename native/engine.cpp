#include "engine.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace phalanx {

namespace {

constexpr std::uint64_t kNap = 5'000'000;  // nanoseconds asleep between two looks at the peers' lives

// Elements [first, last) of a slice when `count` elements are divided among `parts`; slices begin
// at multiples of a cache line so that no two ranks write to the same one.
struct Slice {
  std::size_t first, last;
};

Slice slice(std::size_t count, std::size_t size, std::size_t part, std::size_t parts) {
  const std::size_t grain = std::max<std::size_t>(1, kLine / size);
  const std::size_t grains = (count + grain - 1) / grain;
  return {std::min(count, grains * part / parts * grain),
          std::min(count, grains * (part + 1) / parts * grain)};
}

}  // namespace

Engine::Engine(Region region, int rank, int cores)
    : region_(std::move(region)),
      rank_(rank),
      ranks_(region_.layout().ranks),
      pace_(pace_for(ranks_, cores)),
      mine_(region_.control(rank)),
      transfers_(region_, rank) {
  std::fill(std::begin(pidfds_), std::end(pidfds_), -1);
  mine_.present.publish(region_.token());
}

Engine::~Engine() {
  for (const int fd : pidfds_)
    if (fd >= 0) ::close(fd);
}

void Engine::watch(int rank, int pidfd) { pidfds_[rank] = pidfd; }

std::uint64_t Engine::issue(Request request) {
  const std::lock_guard lock(mutex_);
  Operation& operation = queue_.emplace_back();
  operation.request = std::move(request);
  operation.sequence = ++issued_;
  progress();
  return issued_;
}

Verdict Engine::test(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  progress();
  return verdict(ticket);
}

Verdict Engine::wait(std::uint64_t ticket, std::uint64_t nanoseconds) {
  std::uint64_t deadline = 0;  // the clock is read only when the first look was in vain
  while (true) {
    Watch watch;
    {
      const std::lock_guard lock(mutex_);
      progress();
      const Verdict now = verdict(ticket);
      if (now.outcome != Outcome::pending) return now;
      watch = watch_;
    }
    const auto moved = [&] {
      return watch.counter == nullptr || watch.counter->read() >= watch.needed;
    };
    if (wait_a_while(mine_.bed, pace_, std::min(kNap, nanoseconds), moved)) continue;
    {
      const std::lock_guard lock(mutex_);
      look_for_dead();
    }
    const std::uint64_t now = now_ns();
    if (deadline == 0) deadline = now + nanoseconds;
    if (now >= deadline) return test(ticket);
  }
}

std::uint64_t Engine::send(int to, std::int64_t tag, const char* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = transfers_.send(to, tag, data, bytes);
  transfers_.progress();
  return ticket;
}

std::uint64_t Engine::receive(int from, std::int64_t tag, char* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = transfers_.receive(from, tag, data, bytes);
  transfers_.progress();
  return ticket;
}

Transfers::Status Engine::test_transfer(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  progress();
  transfers_.progress();
  return transfers_.status(ticket);
}

Transfers::Status Engine::wait_transfer(std::uint64_t ticket, std::uint64_t nanoseconds) {
  const std::uint64_t deadline = now_ns() + nanoseconds;
  while (true) {
    const Transfers::Status status = test_transfer(ticket);
    if (status.state != Transfers::State::pending || now_ns() >= deadline) return status;
    const auto news = [&] {
      const std::lock_guard lock(mutex_);
      return transfers_.has_news() || failure_.outcome != Outcome::pending;
    };
    if (!wait_a_while(mine_.bed, pace_, std::min(kNap, nanoseconds), news) &&
        status.peer >= 0 && has_ended(status.peer) && !news())
      return status;  // nothing more will come; the caller asks `dead`
  }
}

void Engine::forget_transfer(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  transfers_.forget(ticket);
}

std::vector<int> Engine::dead() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < ranks_; ++rank)
    if (has_ended(rank)) ranks.push_back(rank);
  return ranks;
}

void Engine::leave() {
  const std::lock_guard lock(mutex_);
  publish(&Control::left_at, issued_ + 1);
}

void Engine::forget(int rank) {
  const std::lock_guard lock(mutex_);
  forgotten_ |= std::uint64_t{1} << rank;
  if (failure_.outcome == Outcome::dead && failure_.first == rank) failure_ = {};
}

void Engine::abort() {
  const std::lock_guard lock(mutex_);
  failure_.outcome = Outcome::aborted;
  for (int rank = 0; rank < ranks_; ++rank) wake(region_.control(rank).bed);
}

Verdict Engine::verdict(std::uint64_t ticket) const {
  if (ticket <= finished_) return {Outcome::finished, -1, -1};
  return failure_;
}

// -- progress -------------------------------------------------------------------------------------

void Engine::progress() {
  if (failure_.outcome != Outcome::pending) return;
  watch_ = {};
  bool moved = true;
  while (moved && failure_.outcome == Outcome::pending) {
    moved = announce_next();
    moved |= share_next();
    moved |= finish_next();
  }
  if (transfers_.is_busy()) transfers_.progress();
}

// A place in the ring, with its slot, is free again when everybody is done with what was there.
bool Engine::announce_next() {
  if (announced_ == issued_) return false;
  const std::uint64_t next = announced_ + 1;
  if (next > kRing) {
    refresh_members(next - kRing);
    if (!everybody(&Control::done, next - kRing)) return false;
  }
  describe(queue_[next - finished_ - 1]);
  announced_ = next;
  publish(&Control::arrived, next);
  return true;
}

bool Engine::share_next() {
  if (shared_ == announced_) return false;
  const std::uint64_t next = shared_ + 1;
  refresh_members(next);
  if (!everybody(&Control::arrived, next)) return false;
  Operation& operation = queue_[next - finished_ - 1];
  if (!operation.in_windows && !agreed(operation)) return false;
  if (!share(operation)) return false;
  shared_ = next;
  publish(&Control::done, next);
  return true;
}

bool Engine::finish_next() {
  if (finished_ == shared_) return false;
  const Operation& operation = queue_.front();
  // Others may still be reading, or writing to, what lies where it lay; they never touch the rest.
  const Descriptor& mine = descriptor(rank_, operation.sequence);
  const bool exposed = mine.offset != kNever && mine.bytes > region_.layout().sizes.small &&
                       is_source(operation.request, rank_) && !operation.in_windows;
  if (exposed) {
    refresh_members(operation.sequence);
    if (!everybody(&Control::done, operation.sequence)) return false;
  }
  ++finished_;
  queue_.pop_front();
  return true;
}

void Engine::describe(Operation& operation) {
  const Request& request = operation.request;
  Descriptor& mine = mine_.ring[operation.sequence % kRing];
  mine.sequence = operation.sequence;
  mine.bytes = request.bytes;
  mine.extent = request.extent;
  mine.offset = region_.offset_of(request.input, request.bytes);
  mine.clock = now_ns();
  mine.factor = request.reduction.factor;
  mine.root = request.root;
  mine.kind = request.kind;
  mine.type = request.reduction.type;
  mine.op = request.reduction.op;
  if (request.kind == Kind::alltoall)
    std::copy(request.send_at.begin(), request.send_at.end(),
              mine_.splits[operation.sequence % kRing]);
  const Layout& layout = region_.layout();
  if (request.bytes != 0 && request.bytes <= layout.sizes.small && is_source(request, rank_))
    std::memcpy(region_.bytes(layout.small_slot(rank_, operation.sequence)), request.input,
                request.bytes);
}

bool Engine::agreed(const Operation& operation) {
  const Descriptor& mine = descriptor(rank_, operation.sequence);
  for (const int rank : members_) {
    const Descriptor& theirs = descriptor(rank, operation.sequence);
    const bool same = theirs.kind == mine.kind && theirs.type == mine.type &&
                      theirs.op == mine.op && theirs.root == mine.root &&
                      theirs.extent == mine.extent && theirs.factor == mine.factor;
    if (!same) {
      failure_ = {Outcome::mismatch, std::min(rank_, rank), std::max(rank_, rank)};
      return false;
    }
  }
  return true;
}

// -- peers ----------------------------------------------------------------------------------------

// A rank is a member of every operation before the one that it left at. That word is final once it
// is set, and a rank that has arrived has not left, so all ranks see the same members.
void Engine::refresh_members(std::uint64_t sequence) {
  members_.clear();
  for (int rank = 0; rank < ranks_; ++rank) {
    const bool lost = (forgotten_ >> rank & 1) != 0 && region_.control(rank).arrived.read() < sequence;
    if (!lost && region_.control(rank).left_at.read() > sequence) members_.push_back(rank);
  }
}

bool Engine::everybody(Counter Control::*counter, std::uint64_t needed) {
  for (const int rank : members_) {
    const Counter& theirs = region_.control(rank).*counter;
    if (theirs.read() < needed) {
      watch_ = {&theirs, needed, rank};
      return false;
    }
  }
  return true;
}

void Engine::publish(Counter Control::*counter, std::uint64_t value) {
  (mine_.*counter).publish(value);
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) wake(region_.control(rank).bed);
}

// Only a rank that is being waited for matters. Its words do not change any more once it is dead, so
// they are read again after that is known: what it did before it died counts.
void Engine::look_for_dead() {
  if (failure_.outcome != Outcome::pending || watch_.rank < 0) return;
  if (has_ended(watch_.rank) && watch_.counter->read() < watch_.needed)
    failure_ = {Outcome::dead, watch_.rank, -1};
}

bool Engine::has_ended(int rank) const {
  if (pidfds_[rank] < 0) return false;
  pollfd poll{pidfds_[rank], POLLIN, 0};
  return ::poll(&poll, 1, 0) == 1;
}

bool Engine::is_source(const Request& request, int rank) const {
  switch (request.kind) {
    case Kind::broadcast:
    case Kind::scatter:
      return rank == request.root;
    case Kind::barrier:
    case Kind::none:
      return false;
    default:
      return true;
  }
}

// -- shares ---------------------------------------------------------------------------------------

// Where the inputs of all members can be read: this is all that differs between the three ways.
// `from` and `length` select bytes of each input.
class Shares {
 public:
  Shares(Engine& engine, const Engine::Operation& operation)
      : engine_(engine), request_(operation.request), operation_(operation) {}

  // Does this rank's share of bytes [from, to) of every input, which lies at `at(rank)`.
  template <class At>
  void run(At&& at, std::size_t from, std::size_t to) {
    switch (request_.kind) {
      case Kind::allreduce:
      case Kind::reduce:
        if (request_.kind == Kind::allreduce || engine_.rank_ == request_.root)
          reduce_into(request_.outputs[0], 0, at, from, to);
        break;
      case Kind::reduce_scatter: {
        const std::size_t begin = request_.output_bytes * index_of(engine_.rank_);
        reduce_into(request_.outputs[0], begin, at, from, to);
        break;
      }
      case Kind::broadcast:
        if (engine_.rank_ != request_.root)
          copy(request_.root, 0, request_.bytes, request_.outputs[0], at, from, to);
        break;
      case Kind::allgather:
        gather(at, from, to);
        break;
      case Kind::gather:
        if (engine_.rank_ == request_.root) gather(at, from, to);
        break;
      case Kind::scatter:
        copy(request_.root, request_.output_bytes * static_cast<std::size_t>(engine_.rank_),
             request_.output_bytes, request_.outputs[0], at, from, to);
        break;
      case Kind::alltoall:
        exchange(at, from, to);
        break;
      case Kind::barrier:
      case Kind::none:
        break;
    }
  }

 private:
  // Copies what [begin, begin + length) of one input and [from, to) have in common to `target`,
  // where byte `begin` belongs at its start.
  template <class At>
  void copy(int rank, std::size_t begin, std::size_t length, char* target, At& at,
            std::size_t from, std::size_t to) {
    const std::size_t first = std::max(begin, from);
    const std::size_t last = std::min(begin + length, to);
    if (first >= last) return;
    char* const into = target + (first - begin);
    const char* const source = at(rank) + (first - from);
    if (into != source) std::memcpy(into, source, last - first);
  }

  template <class At>
  void gather(At& at, std::size_t from, std::size_t to) {
    for (const int rank : engine_.members_)
      copy(rank, 0, request_.bytes, request_.outputs[static_cast<std::size_t>(rank)], at, from, to);
  }

  template <class At>
  void exchange(At& at, std::size_t from, std::size_t to) {
    for (const int rank : engine_.members_) {
      const auto me = static_cast<std::size_t>(engine_.rank_);
      const auto them = static_cast<std::size_t>(rank);
      const std::uint64_t* splits = engine_.region_.control(rank).splits[operation_.sequence % kRing];
      copy(rank, splits[me], splits[me + 1] - splits[me],
           request_.outputs[0] + request_.receive_at[them], at, from, to);
    }
  }

  // Reduces what [begin, begin + output) of all inputs and [from, to) have in common.
  template <class At>
  void reduce_into(char* target, std::size_t begin, At& at, std::size_t from, std::size_t to) {
    const std::size_t first = std::max(begin, from);
    const std::size_t last = std::min(begin + request_.output_bytes, to);
    if (first >= last) return;
    const void* inputs[kMaxRanks];
    std::size_t count = 0;
    for (const int rank : engine_.members_) inputs[count++] = at(rank) + (first - from);
    reduce(request_.reduction, {inputs, count}, target + (first - begin),
           (last - first) / size_of(request_.reduction.type));
  }

  std::size_t index_of(int rank) const {
    const auto found = std::find(engine_.members_.begin(), engine_.members_.end(), rank);
    return static_cast<std::size_t>(found - engine_.members_.begin());
  }

  Engine& engine_;
  const Request& request_;
  const Engine::Operation& operation_;
};

// Returns whether this rank's share is done; only windows may take several turns.
bool Engine::share(Operation& operation) {
  if (operation.in_windows) return run_windows(operation);
  const Request& request = operation.request;
  const Layout& layout = region_.layout();
  std::uint64_t longest = 0;
  bool direct = true;
  for (const int rank : members_) {
    if (!is_source(request, rank)) continue;
    const Descriptor& theirs = descriptor(rank, operation.sequence);
    longest = std::max(longest, theirs.bytes);
    direct = direct && theirs.offset != kNever;
  }
  if (longest <= layout.sizes.small) {
    const auto slot = [&](int rank) {
      return region_.bytes(layout.small_slot(rank, operation.sequence));
    };
    Shares(*this, operation).run(slot, 0, longest);
    return true;
  }
  if (!direct) {
    operation.in_windows = true;
    operation.windows = (longest + layout.sizes.window - 1) / layout.sizes.window;
    return run_windows(operation);
  }
  const auto place = [&](int rank) {
    return region_.bytes(descriptor(rank, operation.sequence).offset);
  };
  if (request.kind != Kind::allreduce) {
    Shares(*this, operation).run(place, 0, longest);
    return true;
  }
  // Each member reduces its slice over all buffers and stores the result into all of them.
  const std::size_t size = size_of(request.reduction.type);
  const auto part = static_cast<std::size_t>(
      std::find(members_.begin(), members_.end(), rank_) - members_.begin());
  const Slice own = slice(longest / size, size, part, members_.size());
  void* buffers[kMaxRanks];
  std::size_t count = 0;
  for (const int rank : members_) buffers[count++] = place(rank) + own.first * size;
  reduce_to_all(request.reduction, {buffers, count}, own.last - own.first);
  return true;
}

// Three hands on the same windows: fill mine, work on everybody's, finish with everybody's. Each is
// at most `windows` ahead of the last, so that filling the next overlaps with working on this one.
bool Engine::run_windows(Operation& operation) {
  const Request& request = operation.request;
  const Layout& layout = region_.layout();
  const std::size_t room = layout.sizes.window;
  const std::uint64_t base = windows_used_;
  const bool sliced = request.kind == Kind::allreduce;
  bool moved = true;
  while (moved) {
    moved = false;
    const std::uint64_t fill = base + operation.filled;
    if (operation.filled < operation.windows &&
        (fill < layout.sizes.windows ||
         everybody(&Control::finished, fill - layout.sizes.windows + 1))) {
      const std::size_t from = operation.filled * room;
      if (is_source(request, rank_) && from < request.bytes)
        std::memcpy(region_.bytes(layout.window(rank_, fill)), request.input + from,
                    std::min(room, request.bytes - from));
      ++operation.filled;
      publish(&Control::filled, base + operation.filled);
      moved = true;
    }
    const std::uint64_t work = base + operation.worked;
    if (operation.worked < operation.filled && everybody(&Control::filled, work + 1)) {
      const std::size_t from = operation.worked * room;
      const auto window = [&](int rank) { return region_.bytes(layout.window(rank, work)); };
      if (sliced) {
        reduce_own_slice(operation, work, from);
      } else {
        Shares(*this, operation).run(window, from, from + room);
      }
      ++operation.worked;
      publish(&Control::worked, base + operation.worked);
      moved = true;
    }
    const std::uint64_t finish = base + operation.finished;
    if (operation.finished < operation.worked &&
        (!sliced || everybody(&Control::worked, finish + 1))) {
      if (sliced) collect_slices(operation, finish, operation.finished * room);
      ++operation.finished;
      publish(&Control::finished, base + operation.finished);
      moved = true;
    }
  }
  if (operation.finished < operation.windows) return false;
  windows_used_ += operation.windows;
  return true;
}

// An all-reduce in windows: a member reduces its slice of the window in place, in its own window...
void Engine::reduce_own_slice(const Operation& operation, std::uint64_t number, std::size_t from) {
  const Request& request = operation.request;
  const Layout& layout = region_.layout();
  const std::size_t size = size_of(request.reduction.type);
  const std::size_t count = std::min(layout.sizes.window, request.bytes - from) / size;
  const auto part = static_cast<std::size_t>(
      std::find(members_.begin(), members_.end(), rank_) - members_.begin());
  const Slice own = slice(count, size, part, members_.size());
  const void* inputs[kMaxRanks];
  std::size_t n = 0;
  for (const int rank : members_)
    inputs[n++] = region_.bytes(layout.window(rank, number)) + own.first * size;
  reduce(request.reduction, {inputs, n},
         region_.bytes(layout.window(rank_, number)) + own.first * size, own.last - own.first);
}

// ... and everybody collects the slices from their owners.
void Engine::collect_slices(const Operation& operation, std::uint64_t number, std::size_t from) {
  const Request& request = operation.request;
  const Layout& layout = region_.layout();
  const std::size_t size = size_of(request.reduction.type);
  const std::size_t count = std::min(layout.sizes.window, request.bytes - from) / size;
  for (std::size_t part = 0; part < members_.size(); ++part) {
    const Slice theirs = slice(count, size, part, members_.size());
    std::memcpy(request.outputs[0] + from + theirs.first * size,
                region_.bytes(layout.window(members_[part], number)) + theirs.first * size,
                (theirs.last - theirs.first) * size);
  }
}

}  // namespace phalanx
