// This rank's part of each collective, on the three data paths of `engine.hpp`.

#include <algorithm>
#include <cassert>
#include <cstring>
#include <numeric>
#include <span>

#include "copy.hpp"
#include "engine.hpp"

namespace phalanx {

namespace {

// Elements [first, last) of one of `parts` slices of `count` elements. Slices begin at multiples of a
// cache line, so that no two ranks write to the same one.
struct Slice {
  std::size_t first, last;
};

Slice slice(std::size_t count, std::size_t size, std::size_t part, std::size_t parts) {
  const std::size_t grain = std::max<std::size_t>(1, kCacheLine / size);
  const std::size_t grains = (count + grain - 1) / grain;
  return {std::min(count, grains * part / parts * grain),
          std::min(count, grains * (part + 1) / parts * grain)};
}

// Reduces in pieces that stay in the first-level cache until they are stored.
void reduce_bypassing_cache(const Reduction& reduction, std::span<const void* const> in, char* out,
                            std::size_t count) {
  constexpr std::size_t kPiece = 8 * 1024;
  alignas(kCacheLine) char piece[kPiece];
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

// Fills in the inputs of a tree, given the first of each rank, and returns their number.
template <class At>
std::size_t tree_inputs(const Tree& tree, At&& at, const void* (&inputs)[kMaxTreeInputs]) {
  std::size_t count = 0;
  for (std::size_t rank = 0; rank < tree.inputs.size(); ++rank)
    for (std::size_t slot = 0; slot < tree.inputs[rank]; ++slot)
      inputs[count++] = at(static_cast<int>(rank)) + slot * tree.slot_bytes;
  return count;
}

}  // namespace

// The collectives over inputs that can be read at `at(rank)`, which is all that differs between paths.
class Executor {
 public:
  Executor(Engine& engine, const Engine::Operation& operation, bool bypasses_cache = false)
      : engine_(engine),
        request_(operation.request),
        operation_(operation),
        bypass_cache_(bypasses_cache) {}

  // Executes this rank's part for bytes [from, to) of every input; `at(rank)` points to byte `from`.
  template <class At>
  void run(At&& at, std::size_t from, std::size_t to) {
    switch (request_.kind) {
      case Collective::allreduce:
      case Collective::reduce:
        if (request_.kind == Collective::allreduce || engine_.rank_ == request_.root)
          reduce_into(request_.outputs[0], 0, at, from, to);
        break;
      case Collective::reduce_scatter: {
        const std::size_t begin = request_.output_bytes * static_cast<std::size_t>(engine_.rank_);
        reduce_into(request_.outputs[0], begin, at, from, to);
        break;
      }
      case Collective::broadcast:
        if (engine_.rank_ != request_.root)
          copy(request_.root, 0, request_.bytes, request_.outputs[0], at, from, to);
        break;
      case Collective::allgather:
        gather(at, from, to);
        break;
      case Collective::gather:
        if (engine_.rank_ == request_.root) gather(at, from, to);
        break;
      case Collective::scatter:
        copy(request_.root, request_.output_bytes * static_cast<std::size_t>(engine_.rank_),
             request_.output_bytes, request_.outputs[0], at, from, to);
        break;
      case Collective::alltoall:
        exchange(at, from, to);
        break;
      case Collective::ordered_allreduce:
        sum_small_tree(at);
        break;
      case Collective::barrier:
        break;
    }
  }

 private:
  // Copies the intersection of [begin, begin + length) of one input with [from, to) to `target`, which
  // begins with byte `begin`.
  template <class At>
  void copy(int rank, std::size_t begin, std::size_t length, char* target, At& at,
            std::size_t from, std::size_t to) {
    const std::size_t first = std::max(begin, from);
    const std::size_t last = std::min(begin + length, to);
    if (first >= last) return;
    char* const into = target + (first - begin);
    const char* const source = at(rank) + (first - from);
    if (into != source) copy_bytes(into, source, last - first, bypass_cache_);
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
      const Control& theirs = engine_.region_.control(rank);
      const std::uint64_t* splits = theirs.splits[operation_.sequence % kRingSize];
      copy(rank, splits[me], splits[me + 1] - splits[me],
           request_.outputs[0] + request_.receive_at[them], at, from, to);
    }
  }

  // Reduces the intersection of [begin, begin + output_bytes) of all inputs with [from, to).
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
    // An input that is also the output is already in the cache.
    const bool in_place = std::find(inputs, inputs + count, into) != inputs + count;
    if (bypass_cache_ && !in_place)
      reduce_bypassing_cache(request_.reduction, {inputs, count}, into, elements);
    else
      reduce(request_.reduction, {inputs, count}, into, elements);
  }

  template <class At>
  void sum_small_tree(At& at) {
    const void* inputs[kMaxTreeInputs];
    const std::size_t count = tree_inputs(*request_.tree, at, inputs);
    const DType type = request_.reduction.type;
    void* const output = request_.outputs[0];
    sum_tree(type, {inputs, count}, request_.tree->merges, request_.reduction.factor, {&output, 1},
             request_.output_bytes / size_of(type));
  }

  Engine& engine_;
  const Request& request_;
  const Engine::Operation& operation_;
  const bool bypass_cache_;
};

// Returns whether this rank's part is done. That may take several calls: windows wait for peers, and a
// direct operation stops when a member aborts and continues at `done_bytes`.
bool Engine::execute(Operation& operation) {
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
    Executor(*this, operation).run(slot, 0, longest);
    return true;
  }
  if (!direct) {
    assert(request.kind != Collective::ordered_allreduce && "callers check tree_error()");
    operation.in_windows = true;
    operation.windows = (longest + layout.sizes.window - 1) / layout.sizes.window;
    return run_windows(operation);
  }
  if (!begin_access()) return false;
  operation.direct = true;
  const bool done = execute_direct(operation, longest);
  end_access();
  return done;
}

// Calls `piece(from, to)` for consecutive pieces of [0, length), from where the last call stopped. A
// piece accesses no other bytes of any buffer. Stops when a member has aborted, and is resumed later.
// The slices depend on the members, which are the same then: `refresh_members` keeps every rank that
// had arrived, even if it has died since.
template <class Piece>
bool Engine::for_each_piece(Operation& operation, std::size_t length, Piece&& piece) {
  while (operation.done_bytes < length) {
    const std::size_t from = operation.done_bytes;
    const std::size_t to = std::min(length, from + region_.layout().sizes.piece);
    piece(from, to);
    operation.done_bytes = to;
    if (!continue_access()) return false;
  }
  return true;
}

bool Engine::execute_direct(Operation& operation, std::size_t longest) {
  const Request& request = operation.request;
  if (request.kind == Collective::broadcast) return broadcast(operation, longest);
  if (request.kind == Collective::ordered_allreduce) return sum_tree_directly(operation);
  const auto place = [&](int rank) {
    return region_.bytes(descriptor(rank, operation.sequence).offset);
  };
  if (request.kind != Collective::allreduce) {
    Executor executor(*this, operation, bypasses_cache(request, longest));
    return for_each_piece(operation, longest, [&](std::size_t from, std::size_t to) {
      executor.run([&](int rank) { return place(rank) + from; }, from, to);
    });
  }
  // All-reduce: each member reduces its slice over all buffers and stores the result into all.
  const std::size_t size = size_of(request.reduction.type);
  const Slice own = slice(longest / size, size, member_index(), members_.size());
  const std::size_t length = (own.last - own.first) * size;
  return for_each_piece(operation, length, [&](std::size_t from, std::size_t to) {
    void* buffers[kMaxRanks];
    std::size_t count = 0;
    for (const int rank : members_) buffers[count++] = place(rank) + own.first * size + from;
    reduce_to_all(request.reduction, {buffers, count}, (to - from) / size);
  });
}

// Each rank sums its slice over the inputs of all ranks and stores it into the result slots of all.
bool Engine::sum_tree_directly(Operation& operation) {
  const Request& request = operation.request;
  const Tree& tree = *request.tree;
  const DType type = request.reduction.type;
  const std::size_t size = size_of(type);
  const Slice own = slice(request.output_bytes / size, size, member_index(), members_.size());
  const std::size_t length = (own.last - own.first) * size;
  const bool bypass_cache = bypasses_cache(request, request.bytes);
  return for_each_piece(operation, length, [&](std::size_t from, std::size_t to) {
    const auto input = [&](int rank) {
      return region_.bytes(descriptor(rank, operation.sequence).offset) + own.first * size + from;
    };
    const void* inputs[kMaxTreeInputs];
    const std::span<const void* const> in{inputs, tree_inputs(tree, input, inputs)};
    void* outputs[kMaxRanks];
    for (int rank = 0; rank < ranks_; ++rank) outputs[rank] = input(rank) - tree.slot_bytes;
    const std::span<void* const> out{outputs, static_cast<std::size_t>(ranks_)};
    sum_tree(type, in, tree.merges, request.reduction.factor, out, (to - from) / size, bypass_cache);
  });
}

const char* Engine::tree_error(const Request& request) const {
  const Tree& tree = *request.tree;
  if (!supports_tree(request.reduction.type)) return "the element type must be float or complex";
  if (!is_tree_divisor(request.reduction.factor)) return "divisor must be from 2^-126 to 2^126";
  if (tree.inputs.size() != static_cast<std::size_t>(ranks_))
    return "tree_inputs must have one number per rank";
  const std::size_t size = size_of(request.reduction.type);
  const std::size_t most = *std::max_element(tree.inputs.begin(), tree.inputs.end());
  const std::size_t count = std::accumulate(tree.inputs.begin(), tree.inputs.end(), std::size_t{0});
  if (count != tree.merges.size()) return "merges must have one number per input of the tree";
  if (!is_tree(tree.merges)) return "merges must leave one sum: see sum_tree";
  if (request.output_bytes % size != 0 || tree.slot_bytes % size != 0)
    return "slots must have whole elements";
  if (request.output_bytes > tree.slot_bytes) return "the result must fit into a slot";
  if (request.bytes < (most - 1) * tree.slot_bytes + request.output_bytes)
    return "there must be one slot for the result and as many as any rank has inputs";
  const char* const result = request.outputs[0];
  if (request.input != result + tree.slot_bytes) return "inputs must follow the slot of the result";
  if (!is_small(request) && region_.offset_of(result, tree.slot_bytes + request.bytes) == kNever)
    return "large slots must be in shared memory: see allocate";
  return nullptr;
}

// Whether an operation touches more than fits in the cache.
bool Engine::bypasses_cache(const Request& request, std::size_t longest) const {
  const std::size_t n = members_.size();
  const std::size_t out =
      request.kind == Collective::allgather ? n * request.bytes : request.output_bytes;
  const bool one_source = request.kind == Collective::broadcast || request.kind == Collective::scatter;
  const std::size_t in = one_source ? longest : n * longest;
  return in + n * out >= region_.layout().sizes.streamed;
}

// Every receiver copies from the root's buffer. The root would otherwise be idle; it stores the last of
// as many parts as there are members into the receivers' buffers that are in the region.
bool Engine::broadcast(Operation& operation, std::size_t bytes) {
  const int root = operation.request.root;
  const std::size_t part = bytes / members_.size() / kCacheLine * kCacheLine;
  const auto place = [&](int rank) { return descriptor(rank, operation.sequence).offset; };
  const auto is_helped = [&](int rank) { return rank != root && place(rank) != kNever; };
  operation.root_assists = std::any_of(members_.begin(), members_.end(), is_helped);
  const char* const source = region_.bytes(place(root));
  const bool bypass_cache = bypasses_cache(operation.request, bytes);
  if (rank_ != root)
    return for_each_piece(
        operation, is_helped(rank_) ? bytes - part : bytes, [&](std::size_t from, std::size_t to) {
          char* const into = operation.request.outputs[0] + from;
          copy_bytes(into, source + from, to - from, bypass_cache);
        });
  const std::size_t length = operation.root_assists ? part : 0;
  return for_each_piece(operation, length, [&](std::size_t from, std::size_t to) {
    const std::size_t at = bytes - part + from;
    for (const int rank : members_)
      if (is_helped(rank))
        copy_bytes(region_.bytes(place(rank)) + at, source + at, to - from, bypass_cache);
  });
}

// A pipeline of three stages: fill this rank's window, process all ranks' windows, release them. Each
// stage is at most `windows` ahead of the last, so that filling overlaps with processing.
bool Engine::run_windows(Operation& operation) {
  const Request& request = operation.request;
  const Layout& layout = region_.layout();
  const std::size_t room = layout.sizes.window;
  const std::uint64_t base = windows_used_;
  const bool sliced = request.kind == Collective::allreduce;
  bool moved = true;
  while (moved) {
    moved = false;
    const std::uint64_t fill = base + operation.filled;
    if (operation.filled < operation.windows &&
        (fill < layout.sizes.windows ||
         all_reached(&Control::released, fill - layout.sizes.windows + 1))) {
      const std::size_t from = operation.filled * room;
      if (is_source(request, rank_) && from < request.bytes) fill_window(operation, fill, from);
      ++operation.filled;
      publish(&Control::filled, base + operation.filled);
      moved = true;
    }
    const std::uint64_t work = base + operation.processed;
    if (operation.processed < operation.filled && all_reached(&Control::filled, work + 1)) {
      const std::size_t from = operation.processed * room;
      const auto window = [&](int rank) {
        return rank == rank_ ? request.input + from : region_.bytes(layout.window(rank, work));
      };
      if (sliced) {
        reduce_own_slice(operation, work, from);
      } else {
        Executor(*this, operation).run(window, from, from + room);
      }
      ++operation.processed;
      publish(&Control::processed, base + operation.processed);
      moved = true;
    }
    const std::uint64_t finish = base + operation.released;
    if (operation.released < operation.processed &&
        (!sliced || all_reached(&Control::processed, finish + 1))) {
      if (sliced) collect_slices(operation, finish, operation.released * room);
      ++operation.released;
      publish(&Control::released, base + operation.released);
      moved = true;
    }
  }
  if (operation.released < operation.windows) return false;
  windows_used_ += operation.windows;
  // The pipeline does not wait for excluded ranks, whose counters are final.
  for (const int rank : members_)
    if (is_source(request, rank) &&
        (died_before(rank, &Control::filled, windows_used_) ||
         (sliced && died_before(rank, &Control::processed, windows_used_))))
      mark_failed(operation, Outcome::torn, rank);
  return true;
}

std::size_t Engine::member_index() const {
  return static_cast<std::size_t>(std::find(members_.begin(), members_.end(), rank_) -
                                  members_.begin());
}

// Copies what peers need of this rank's input to its window. Of an all-reduce that is all but its own
// slice.
void Engine::fill_window(const Operation& operation, std::uint64_t number, std::size_t from) {
  const Request& request = operation.request;
  char* const window = region_.bytes(region_.layout().window(rank_, number));
  const std::size_t bytes = std::min(region_.layout().sizes.window, request.bytes - from);
  Slice own{bytes, bytes};
  if (request.kind == Collective::allreduce) {
    const std::size_t size = size_of(request.reduction.type);
    own = slice(bytes / size, size, member_index(), members_.size());
    own = {own.first * size, own.last * size};
  }
  copier_.copy(window, request.input + from, own.first);
  copier_.copy(window + own.last, request.input + from + own.last, bytes - own.last);
}

// All-reduce in windows: each member reduces its slice into its output and its window...
void Engine::reduce_own_slice(const Operation& operation, std::uint64_t number, std::size_t from) {
  const Request& request = operation.request;
  const Layout& layout = region_.layout();
  const std::size_t size = size_of(request.reduction.type);
  const std::size_t count = std::min(layout.sizes.window, request.bytes - from) / size;
  const Slice own = slice(count, size, member_index(), members_.size());
  const std::size_t at = own.first * size;
  const void* inputs[kMaxRanks];
  std::size_t n = 0;
  for (const int rank : members_)
    inputs[n++] = rank == rank_ ? request.input + from + at
                                : region_.bytes(layout.window(rank, number)) + at;
  char* const target = request.outputs[0] + from + at;
  reduce(request.reduction, {inputs, n}, target, own.last - own.first);
  copier_.copy(region_.bytes(layout.window(rank_, number)) + at, target,
               (own.last - own.first) * size);
}

// ... and copies the other slices from their owners' windows.
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
