// The memory layout of the region that the ranks of a group share.
//
//   header | control block of each rank | small slots | windows | channels | slab of each rank
//
// Every shared word has one writer and only grows. `left_at` is the exception: it is reset while no
// rank reads it (see `rejoin.cpp`). Counters are sequentially consistent, for two reasons. A rank that
// goes to sleep must not miss the last store before it (see `sync.hpp`). Of `access_epoch` and
// `abort_epoch`, at least one side must see the other's store (see `begin_access`).
// `excluded_since` is published by `done`, which is stored after it.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "types.hpp"

namespace phalanx {

inline constexpr std::size_t kPage = 4096;
inline constexpr int kMaxRanks = 64;

// The offset between the areas of consecutive ranks has an odd number of pages. Ranks walk their
// buffers in step; at a distance of a power of two they compete for the same sets of the caches and
// the TLB, which more than halved the speed of large reductions.
inline constexpr std::size_t kStagger = 17 * kPage;
inline constexpr std::uint64_t kRingSize = 64;  // descriptors per rank
inline constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

enum class Collective : std::uint8_t {
  barrier = 1,
  allreduce = 2,
  reduce = 3,
  broadcast = 4,
  allgather = 5,
  gather = 6,
  scatter = 7,
  reduce_scatter = 8,
  alltoall = 9,
  ordered_allreduce = 10,
};

// One operation of one rank, written before the rank publishes `arrived`.
struct alignas(kCacheLine) Descriptor {
  std::uint64_t bytes = 0;        // of this rank's input
  std::uint64_t fingerprint = 0;  // must be equal on all ranks
  std::uint64_t offset = kNever;  // of the input in the region; kNever for ordinary memory
  double factor = 1.0;
  std::uint64_t slot_bytes = 0;   // of an ordered all-reduce, whose result is in the slot before `offset`
  std::int32_t root = 0;
  Collective kind = Collective::barrier;
  DType type = DType::uint8;
  ReduceOp op = ReduceOp::sum;
};

// A counter that one rank writes and the others read, on its own cache line.
struct alignas(kCacheLine) Counter {
  std::atomic<std::uint64_t> value{0};

  std::uint64_t read() const { return value.load(std::memory_order_seq_cst); }
  void publish(std::uint64_t to) { value.store(to, std::memory_order_seq_cst); }
};

// Where the threads of one rank sleep. Peers write both words; `sync.hpp` has the protocol.
struct alignas(kCacheLine) WaitSlot {
  std::atomic<std::uint32_t> futex_word{0};
  std::atomic<std::uint32_t> waiters{0};
};

struct alignas(kPage) Control {
  Counter arrived;  // the last operation that this rank has described
  Counter done;     // the last operation that it has executed; it no longer reads peers' inputs
  Counter left_at;  // the first operation that it takes no part in; kNever while it is a member

  // Windows that this rank has filled, processed and released since the region was created. All
  // ranks number windows in the same way.
  Counter filled;
  Counter processed;
  Counter released;

  // Rejoin: odd while this rank waits for all others, even again once it is a member.
  Counter rejoin_step;
  Counter calls;         // calls that the group counted here, published before the first step
  WaitSlot rejoin_wait;  // separate, so that the operations of members do not wake a rejoining rank

  Counter abort_epoch;   // odd while this rank has aborted and owns its buffers alone
  Counter access_epoch;  // odd while this rank accesses peers' buffers; advances with each piece
  Counter present;       // the token, once this rank has mapped the region and is ready
  WaitSlot peer_wait;

  // For each excluded rank that had aborted before it died: the first operation that this rank had
  // not executed at that time, else 0. Written once; `exclusions` counts them.
  Counter exclusions;
  std::atomic<std::uint64_t> excluded_since[kMaxRanks]{};

  Descriptor ring[kRingSize];
  std::uint64_t splits[kRingSize][kMaxRanks + 1];  // all-to-all: where the part for each rank begins
};

// A one-way byte stream between two ranks, for sends and receives.
struct alignas(kCacheLine) Channel {
  Counter written;  // bytes that the sender has written since creation
  Counter taken;    // bytes that the receiver has read since creation
};

struct alignas(kPage) Header {
  std::uint64_t magic = 0;
  std::uint64_t token = 0;
  std::uint32_t ranks = 0;
  std::uint32_t version = 0;
};

inline constexpr std::uint64_t kMagic = 0x50484c4e58534d31;  // "PHLNXSM1"

// Tests choose small sizes to reach every branch.
struct Sizes {
  std::size_t small = 16 * 1024;     // operations up to this many bytes take one round
  std::size_t window = 512 * 1024;   // bytes of ordinary memory moved at a time
  std::size_t windows = 4;           // per rank
  std::size_t channel = 256 * 1024;  // bytes in flight between two ranks; a power of two
  std::size_t piece = 256 * 1024;    // bytes of each buffer between two checks for aborted ranks
  std::size_t streamed = std::size_t{32} << 20;  // operations that touch more bypass the cache
  std::size_t slab = std::size_t{1} << 34;       // address space for each rank's own buffers
};

struct Layout {
  Layout(int ranks, const Sizes& sizes);

  int ranks;
  Sizes sizes;
  std::size_t control, small, windows, channels, slabs, total;  // offsets, and the size of the region

  std::size_t small_slot(int rank, std::uint64_t sequence) const {
    const auto r = static_cast<std::size_t>(rank);
    return small + (r * kRingSize + sequence % kRingSize) * sizes.small + r * kStagger;
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
