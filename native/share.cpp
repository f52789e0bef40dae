// This rank's share of an operation, on each of the three ways that data can take (`engine.hpp`).

#include <algorithm>
#include <cstring>
#include <span>

#include "copy.hpp"
#include "engine.hpp"

namespace phalanx {

namespace {

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

void move(char* into, const char* from, std::size_t bytes, bool past_cache) {
  if (past_cache)
    stream_bytes(into, from, bytes);
  else
    std::memcpy(into, from, bytes);
}

// A piece at a time: it stays in the first-level cache until it is stored.
void reduce_past_cache(const Reduction& reduction, std::span<const void* const> in, char* out,
                       std::size_t count) {
  constexpr std::size_t kPiece = 8 * 1024;
  alignas(kLine) char piece[kPiece];
  const std::size_t size = size_of(reduction.type);
  const void* inputs[kMaxRanks];
  for (std::size_t done = 0; done < count; done += kPiece / size) {
    const std::size_t now = std::min(kPiece / size, count - done);
    for (std::size_t i = 0; i < in.size(); ++i)
      inputs[i] = static_cast<const char*>(in[i]) + done * size;
    reduce(reduction, {inputs, in.size()}, piece, now);
    stream_bytes(out + done * size, piece, now * size);
  }
}

}  // namespace

// Where the inputs of all members can be read: this is all that differs between the three ways.
// `from` and `length` select bytes of each input.
class Shares {
 public:
  Shares(Engine& engine, const Engine::Operation& operation, bool streams = false)
      : engine_(engine),
        request_(operation.request),
        operation_(operation),
        streams_(streams) {}

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
        const std::size_t begin = request_.output_bytes * static_cast<std::size_t>(engine_.rank_);
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
    if (into != source) move(into, source, last - first, streams_);
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
    char* const into = target + (first - begin);
    const std::size_t elements = (last - first) / size_of(request_.reduction.type);
    // Where an input lies, its lines are in the cache already.
    const bool in_place = std::find(inputs, inputs + count, into) != inputs + count;
    if (streams_ && !in_place)
      reduce_past_cache(request_.reduction, {inputs, count}, into, elements);
    else
      reduce(request_.reduction, {inputs, count}, into, elements);
  }

  Engine& engine_;
  const Request& request_;
  const Engine::Operation& operation_;
  const bool streams_;  // more is touched than stays in the cache
};

// Returns whether this rank's share is done. That may take several turns: windows wait for peers, and a
// direct share stops when a member gives up, to go on at `reached`.
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
  if (!reach_for_others()) return false;
  operation.direct = true;
  const bool done = share_in_place(operation, longest);
  let_go_of_others();
  return done;
}

// Goes through bytes [0, length) a piece at a time, from where it was left; `piece(from, to)` touches no
// other bytes of any rank's buffer. Stops where somebody has given up, to be gone on with later. The
// members of an operation must be the same then, for they decide on the slices: `refresh_members` keeps
// whoever had arrived, also when it has died since.
template <class Piece>
bool Engine::in_pieces(Operation& operation, std::size_t length, Piece&& piece) {
  while (operation.reached < length) {
    const std::size_t from = operation.reached;
    const std::size_t to = std::min(length, from + region_.layout().sizes.piece);
    piece(from, to);
    operation.reached = to;
    if (!may_touch_more()) return false;
  }
  return true;
}

// Every input lies in the region: ranks read, and an all-reduce writes, where it is.
bool Engine::share_in_place(Operation& operation, std::size_t longest) {
  const Request& request = operation.request;
  if (request.kind == Kind::broadcast) return broadcast(operation, longest);
  const auto place = [&](int rank) {
    return region_.bytes(descriptor(rank, operation.sequence).offset);
  };
  if (request.kind != Kind::allreduce) {
    Shares shares(*this, operation, streams(request, longest));
    return in_pieces(operation, longest, [&](std::size_t from, std::size_t to) {
      shares.run([&](int rank) { return place(rank) + from; }, from, to);
    });
  }
  // Each member reduces its slice over all buffers and stores the result into all of them.
  const std::size_t size = size_of(request.reduction.type);
  const Slice own = slice(longest / size, size, own_part(), members_.size());
  return in_pieces(operation, (own.last - own.first) * size, [&](std::size_t from, std::size_t to) {
    void* buffers[kMaxRanks];
    std::size_t count = 0;
    for (const int rank : members_) buffers[count++] = place(rank) + own.first * size + from;
    reduce_to_all(request.reduction, {buffers, count}, (to - from) / size);
  });
}

// Tells whether an operation touches more than stays in the cache.
bool Engine::streams(const Request& request, std::size_t longest) const {
  const std::size_t n = members_.size();
  const std::size_t out =
      request.kind == Kind::allgather ? n * request.bytes : request.output_bytes;
  const bool one_source = request.kind == Kind::broadcast || request.kind == Kind::scatter;
  const std::size_t in = one_source ? longest : n * longest;
  return in + n * out >= region_.layout().sizes.streamed;
}

// Every receiver copies from the root's buffer. The root, which would have nothing to do, takes the
// last of as many parts as there are members off those whose buffers it can reach.
bool Engine::broadcast(Operation& operation, std::size_t bytes) {
  const int root = operation.request.root;
  const std::size_t part = bytes / members_.size() / kLine * kLine;
  const auto place = [&](int rank) { return descriptor(rank, operation.sequence).offset; };
  const auto is_helped = [&](int rank) { return rank != root && place(rank) != kNever; };
  operation.helped = std::any_of(members_.begin(), members_.end(), is_helped);
  const char* const source = region_.bytes(place(root));
  const bool past_cache = streams(operation.request, bytes);
  if (rank_ != root)
    return in_pieces(operation, is_helped(rank_) ? bytes - part : bytes,
                     [&](std::size_t from, std::size_t to) {
                       move(operation.request.outputs[0] + from, source + from, to - from, past_cache);
                     });
  return in_pieces(operation, operation.helped ? part : 0, [&](std::size_t from, std::size_t to) {
    const std::size_t at = bytes - part + from;
    for (const int rank : members_)
      if (is_helped(rank)) move(region_.bytes(place(rank)) + at, source + at, to - from, past_cache);
  });
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
      if (is_source(request, rank_) && from < request.bytes) fill_window(operation, fill, from);
      ++operation.filled;
      publish(&Control::filled, base + operation.filled);
      moved = true;
    }
    const std::uint64_t work = base + operation.worked;
    if (operation.worked < operation.filled && everybody(&Control::filled, work + 1)) {
      const std::size_t from = operation.worked * room;
      const auto window = [&](int rank) {
        return rank == rank_ ? request.input + from : region_.bytes(layout.window(rank, work));
      };
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
  // The windows were walked through although a lost rank's part is missing, which does not change now.
  for (const int rank : members_)
    if (is_source(request, rank) &&
        (fell_short(rank, &Control::filled, windows_used_) ||
         (sliced && fell_short(rank, &Control::worked, windows_used_))))
      spoil(operation, Outcome::torn, rank);
  return true;
}

std::size_t Engine::own_part() const {
  return static_cast<std::size_t>(std::find(members_.begin(), members_.end(), rank_) -
                                  members_.begin());
}

// What this rank puts into its own window: all that the others need of its input. Its own slice of
// an all-reduce it reads where it is.
void Engine::fill_window(const Operation& operation, std::uint64_t number, std::size_t from) {
  const Request& request = operation.request;
  char* const window = region_.bytes(region_.layout().window(rank_, number));
  const std::size_t bytes = std::min(region_.layout().sizes.window, request.bytes - from);
  Slice own{bytes, bytes};
  if (request.kind == Kind::allreduce) {
    const std::size_t size = size_of(request.reduction.type);
    own = slice(bytes / size, size, own_part(), members_.size());
    own = {own.first * size, own.last * size};
  }
  packer_.copy(window, request.input + from, own.first);
  packer_.copy(window + own.last, request.input + from + own.last, bytes - own.last);
}

// An all-reduce in windows: a member reduces its slice of the window where it is to be...
void Engine::reduce_own_slice(const Operation& operation, std::uint64_t number, std::size_t from) {
  const Request& request = operation.request;
  const Layout& layout = region_.layout();
  const std::size_t size = size_of(request.reduction.type);
  const std::size_t count = std::min(layout.sizes.window, request.bytes - from) / size;
  const Slice own = slice(count, size, own_part(), members_.size());
  const std::size_t at = own.first * size;
  const void* inputs[kMaxRanks];
  std::size_t n = 0;
  for (const int rank : members_)
    inputs[n++] = rank == rank_ ? request.input + from + at
                                : region_.bytes(layout.window(rank, number)) + at;
  char* const target = request.outputs[0] + from + at;
  reduce(request.reduction, {inputs, n}, target, own.last - own.first);
  packer_.copy(region_.bytes(layout.window(rank_, number)) + at, target,
               (own.last - own.first) * size);
}

// ... and everybody collects the slices from their owners.
void Engine::collect_slices(const Operation& operation, std::uint64_t number, std::size_t from) {
  const Request& request = operation.request;
  const Layout& layout = region_.layout();
  const std::size_t size = size_of(request.reduction.type);
  const std::size_t count = std::min(layout.sizes.window, request.bytes - from) / size;
  for (std::size_t part = 0; part < members_.size(); ++part) {
    if (members_[part] == rank_) continue;
    const Slice theirs = slice(count, size, part, members_.size());
    std::memcpy(request.outputs[0] + from + theirs.first * size,
                region_.bytes(layout.window(members_[part], number)) + theirs.first * size,
                (theirs.last - theirs.first) * size);
  }
}

}  // namespace phalanx
