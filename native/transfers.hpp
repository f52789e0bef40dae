// Sends and receives: a one-way byte stream between each two ranks.
//
// A message is a header (length and tag) and its bytes, written into the stream as room allows. The
// receiver reads messages in order. A message without a matching receive is buffered in private memory,
// so that it does not hold up messages with other tags. If there is no memory for that, it stays in the
// stream and is tried again; waiting receives behind it report `State::starved`. A receive of that
// message itself needs no memory and succeeds.
//
// Not thread-safe: callers hold the engine's lock.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "region.hpp"

namespace phalanx {

class Transfers {
 public:
  Transfers(Region& region, int rank);

  // Both return a ticket; tickets count up from 1. The caller keeps the memory until the transfer has
  // ended. If they throw, they have changed nothing.
  std::uint64_t send(int to, std::int64_t tag, const char* data, std::size_t bytes);
  std::uint64_t receive(int from, std::int64_t tag, char* data, std::size_t bytes);  // -1: any sender

  enum class State : std::uint8_t {
    pending,
    finished,
    wrong_size,
    cancelled,
    starved,  // of a wait: pending behind a message for which there is no memory
    stopped,  // of a wait: pending, and the engine was aborted
  };
  struct Status {
    State state = State::pending;
    int peer = -1;
    std::uint64_t bytes = 0;  // of the message
    bool detached = false;    // the status is dropped when the transfer ends
  };

  void progress() noexcept;

  Status status(std::uint64_t ticket) const;

  // The same for a wait, in which a receive may be `starved`.
  Status status_for_wait(std::uint64_t ticket) const;
  std::size_t kept() const { return statuses_.size(); }

  // Drops the status of a transfer once it has ended.
  void detach(std::uint64_t ticket);

  // Cancels a transfer unless a part of it has moved; returns whether it did.
  bool cancel(std::uint64_t ticket);

  bool is_busy() const;

  // Whether a peer has moved bytes since the last `progress`.
  bool can_progress() const;

 private:
  struct MessageHeader {
    std::uint64_t bytes;
    std::int64_t tag;
  };
  struct Send {
    std::uint64_t ticket;
    MessageHeader header;
    const char* data;
    std::size_t written;  // header included
  };
  struct Receive {
    std::uint64_t ticket;
    int from;
    std::int64_t tag;
    char* data;
    std::size_t bytes;
  };
  struct Message {
    MessageHeader header;
    std::unique_ptr<char[]> bytes;
  };
  struct Inbox {
    MessageHeader header{};
    std::size_t received = 0;  // of the current message, header included
    char* target = nullptr;
    std::uint64_t ticket = 0;  // of the matching receive; 0 for an unexpected message
    std::deque<Message> unexpected;  // buffered until a receive matches
    std::uint64_t seen = 0;          // of the sender's `written`
    bool starved = false;            // no memory to buffer the current message
  };

  void push(int to);
  void pull(int from);
  bool match(const Receive& receive);
  bool begin_message(int from, Inbox& inbox);  // false if there is no memory
  void end_message(int from, Inbox& inbox);
  void end(std::uint64_t ticket, Status status);

  Region& region_;
  const int rank_;
  const int ranks_;
  std::uint64_t tickets_ = 0;
  std::vector<std::deque<Send>> outboxes_;
  std::vector<std::uint64_t> taken_seen_;  // of the receivers' `taken`
  std::vector<Inbox> inboxes_;
  std::deque<Receive> receives_;
  std::unordered_map<std::uint64_t, Status> statuses_;
};

}  // namespace phalanx
