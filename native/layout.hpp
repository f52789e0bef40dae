// What lies where in the region that the ranks of a group share.
//
//   header | control block of each rank | small slots | windows | channels | slab of each rank
//
// Every word that ranks synchronise with has one writer and only grows (but for `left_at`, which is
// set back while nobody reads it; see `rejoin.cpp`). Whoever reads a value knows
// that everything its writer did before is visible: a counter is stored with release and read with
// acquire semantics at least. They are sequentially consistent besides, for two reasons: a rank
// that goes to sleep must not miss the last store before it (see `sync.hpp`), and of `touching` and `broken`
// one side must see the other's store (see `reach_for_others`). `without` is the exception: `done`, which
// is stored after it, publishes it.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "types.hpp"

namespace phalanx {

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kPage = 4096;
inline constexpr int kMaxRanks = 64;

// What belongs to one rank begins an odd number of pages off that of the one before. Ranks walk
// their buffers in step; at a distance of a power of two they would compete for the same sets of
// caches and page-table caches, which more than halved the speed of large reductions.
inline constexpr std::size_t kStagger = 17 * kPage;
inline constexpr std::uint64_t kRing = 64;  // descriptors that a rank keeps
inline constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

enum class Kind : std::uint8_t {
  barrier = 1,
  allreduce = 2,
  reduce = 3,
  broadcast = 4,
  allgather = 5,
  gather = 6,
  scatter = 7,
  reduce_scatter = 8,
  alltoall = 9,
};

// What a rank says about one of its operations, before it says that it has arrived there.
struct alignas(kLine) Descriptor {
  std::uint64_t bytes = 0;   // of this rank's input
  std::uint64_t extent = 0;  // what ranks must agree on; see `Operation::extent`
  std::uint64_t offset = kNever;  // of the input in the region; kNever if it lies elsewhere
  double factor = 1.0;
  std::int32_t root = 0;
  Kind kind = Kind::barrier;
  DType type = DType::uint8;
  ReduceOp op = ReduceOp::sum;
};

// A counter that one rank writes and the others read, alone on its line.
struct alignas(kLine) Counter {
  std::atomic<std::uint64_t> value{0};

  std::uint64_t read() const { return value.load(std::memory_order_seq_cst); }
  void publish(std::uint64_t to) { value.store(to, std::memory_order_seq_cst); }
};

// Where a rank sleeps. `sleeping` and `bell` are written by others too, which `sync.hpp` explains.
struct alignas(kLine) Bed {
  std::atomic<std::uint32_t> bell{0};
  std::atomic<std::uint32_t> sleeping{0};
};

struct alignas(kPage) Control {
  Counter arrived;  // the last operation that this rank has described
  Counter done;     // the last one whose share it has done; it reads nothing of the others' any more
  Counter left_at;  // the first one that it does not take part in; kNever while it is a member

  // How many windows this rank has filled, worked on and finished with, ever. Ordinary tensors are
  // moved through windows, which are numbered on their own, alike on every rank.
  Counter filled;
  Counter worked;
  Counter finished;

  // Counts the two steps of becoming a member again: odd while this rank waits for all to come, even
  // again when it has taken its place among the members.
  Counter entry;
  Counter calls;  // before the first step: the calls that its group has made, however many operations
  Bed hall;       // where it sleeps meanwhile, for what the members do is not to wake it

  Counter broken;    // odd while this rank has given up, and has its buffers to itself again
  Counter touching;  // odd while this rank reads or writes buffers of the others; moves with each piece
  Counter present;   // the token, once this rank has mapped the region and lacks nothing
  Bed bed;

  // For each rank that this one goes on without although it gave up before it died: the first
  // operation whose share was not done by then, else 0. Written once; `bereaved` counts them.
  Counter bereaved;
  std::atomic<std::uint64_t> without[kMaxRanks]{};

  Descriptor ring[kRing];
  std::uint64_t splits[kRing][kMaxRanks + 1];  // of all-to-all: where each rank's part begins
};

// A one-way stream from one rank to another, for sends and receives.
struct alignas(kLine) Channel {
  Counter written;  // bytes that the sender has put in, ever
  Counter taken;    // bytes that the receiver has taken out, ever
};

struct alignas(kPage) Header {
  std::uint64_t magic = 0;
  std::uint64_t token = 0;
  std::uint32_t ranks = 0;
  std::uint32_t version = 0;
};

inline constexpr std::uint64_t kMagic = 0x50484c4e58534d31;  // "PHLNXSM1"

// The sizes that may be chosen; tests make them small to reach every branch.
struct Sizes {
  std::size_t small = 16 * 1024;         // an operation of at most this many bytes goes in one round
  std::size_t window = 512 * 1024;       // bytes of an ordinary tensor that are moved at a time
  std::size_t windows = 4;               // of each rank
  std::size_t channel = 256 * 1024;      // bytes under way between two ranks; a power of two
  std::size_t piece = 256 * 1024;  // of each buffer that are touched between two looks at who gave up
  std::size_t streamed = std::size_t{32} << 20;  // what touches more is stored past the cache
  std::size_t slab = std::size_t{1} << 34;  // address space for each rank's own buffers
};

struct Layout {
  Layout(int ranks, const Sizes& sizes);

  int ranks;
  Sizes sizes;
  std::size_t control, small, windows, channels, slabs, total;  // offsets, and the whole

  std::size_t small_slot(int rank, std::uint64_t sequence) const {
    const auto r = static_cast<std::size_t>(rank);
    return small + (r * kRing + sequence % kRing) * sizes.small + r * kStagger;
  }
  std::size_t window(int rank, std::uint64_t number) const {
    const auto r = static_cast<std::size_t>(rank);
    return windows + (r * sizes.windows + number % sizes.windows) * sizes.window + r * kStagger;
  }
  std::size_t channel(int from, int to) const {
    const auto pair = static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks) +
                      static_cast<std::size_t>(to);
    return channels + pair * (sizeof(Channel) + sizes.channel);
  }
  std::size_t slab(int rank) const {
    return slabs + static_cast<std::size_t>(rank) * (sizes.slab + kStagger);
  }
};

}  // namespace phalanx
