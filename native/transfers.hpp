// Sends and receives: a one-way stream of bytes between each two ranks.
//
// A message is a small head (its length and tag) and its bytes, written into the stream as room
// allows. The receiver takes messages off the stream in order; one that nobody has asked for yet is
// put aside in private memory, so that a message with another tag behind it is not held up. Where there
// is no memory for that it stays in the stream, and is tried again; whoever waits for one behind it is
// told (`State::starved`), and who asks for the message itself gets it, for that takes no memory.
//
// Not thread-safe: the engine's lock is held around every call.

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

  // Each returns a ticket, counted up from 1. The memory stays the caller's until it has ended. Throws,
  // with nothing done, where there is no memory to remember it.
  std::uint64_t send(int to, std::int64_t tag, const char* data, std::size_t bytes);
  std::uint64_t receive(int from, std::int64_t tag, char* data, std::size_t bytes);  // -1: anybody

  enum class State : std::uint8_t {
    pending,
    finished,
    wrong_size,
    cancelled,
    starved,  // only told to who waits: pending, behind a message that there is no memory for
    stopped,  // only told to who waits: pending, and nobody moves anything any more
  };
  struct Status {
    State state = State::pending;
    int peer = -1;             // whom it was exchanged with
    std::uint64_t bytes = 0;   // of the message, where the size was wrong or it has no room
    bool forgotten = false;    // nobody will ask how it ended
  };

  // Moves what can be moved.
  void progress() noexcept;

  Status status(std::uint64_t ticket) const;

  // The same for who waits: a receive that is held up for want of memory is `starved`.
  Status status_of_wait(std::uint64_t ticket) const;
  std::size_t kept() const { return statuses_.size(); }

  // Keeps nothing of a transfer once it has ended.
  void forget(std::uint64_t ticket);

  // Takes a transfer back of which nothing has moved yet; tells whether it has.
  bool cancel(std::uint64_t ticket);

  // Tells whether there is anything to move.
  bool is_busy() const;

  // Tells whether a peer has done something since `progress` found nothing to do.
  bool has_news() const;

 private:
  struct Head {
    std::uint64_t bytes;
    std::int64_t tag;
  };
  struct Send {
    std::uint64_t ticket;
    Head head;
    const char* data;
    std::size_t written;  // head included
  };
  struct Receive {
    std::uint64_t ticket;
    int from;
    std::int64_t tag;
    char* data;
    std::size_t bytes;
  };
  struct Message {  // put aside
    Head head;
    std::unique_ptr<char[]> bytes;
  };
  struct Inbox {
    Head head{};
    std::size_t got = 0;  // of the message being taken, head included
    char* target = nullptr;
    std::uint64_t ticket = 0;  // whom it is for; 0 if it is put aside
    std::deque<Message> aside;
    std::uint64_t seen = 0;  // of the sender's `written`
    bool starved = false;    // there was no memory to put aside the message of `head`
  };

  void push(int to);
  void pull(int from);
  bool match(const Receive& receive);
  bool begin_message(int from, Inbox& inbox);  // whether there is room for it
  void end_message(int from, Inbox& inbox);
  void end(std::uint64_t ticket, Status status);

  Region& region_;
  const int rank_;
  const int ranks_;
  std::uint64_t tickets_ = 0;
  std::vector<std::deque<Send>> outboxes_;
  std::vector<std::uint64_t> room_seen_;  // of the receivers' `taken`
  std::vector<Inbox> inboxes_;
  std::deque<Receive> receives_;
  std::unordered_map<std::uint64_t, Status> statuses_;
};

}  // namespace phalanx
