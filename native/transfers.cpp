#include "transfers.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "sync.hpp"

namespace phalanx {

namespace {

Channel& channel(const Region& region, int from, int to) {
  return *reinterpret_cast<Channel*>(region.bytes(region.layout().channel(from, to)));
}

char* ring(const Region& region, int from, int to) {
  return region.bytes(region.layout().channel(from, to)) + sizeof(Channel);
}

// Copy into or out of a ring buffer.
void put(char* ring, std::size_t size, std::uint64_t at, const char* data, std::size_t bytes) {
  if (bytes == 0) return;  // the pointer may be null
  const std::size_t first = std::min<std::size_t>(bytes, size - at % size);
  std::memcpy(ring + at % size, data, first);
  std::memcpy(ring, data + first, bytes - first);
}

void take(const char* ring, std::size_t size, std::uint64_t at, char* data, std::size_t bytes) {
  if (bytes == 0) return;
  const std::size_t first = std::min<std::size_t>(bytes, size - at % size);
  std::memcpy(data, ring + at % size, first);
  std::memcpy(data + first, ring, bytes - first);
}

}  // namespace

Transfers::Transfers(Region& region, int rank)
    : region_(region),
      rank_(rank),
      ranks_(region.layout().ranks),
      outboxes_(static_cast<std::size_t>(ranks_)),
      taken_seen_(static_cast<std::size_t>(ranks_)),
      inboxes_(static_cast<std::size_t>(ranks_)) {}

std::uint64_t Transfers::send(int to, std::int64_t tag, const char* data, std::size_t bytes) {
  const std::uint64_t ticket = tickets_ + 1;
  auto& outbox = outboxes_[static_cast<std::size_t>(to)];
  outbox.push_back({ticket, {bytes, tag}, data, 0});
  try {
    statuses_.emplace(ticket, Status{State::pending, to, bytes});
  } catch (...) {
    outbox.pop_back();
    throw;
  }
  return tickets_ = ticket;
}

std::uint64_t Transfers::receive(int from, std::int64_t tag, char* data, std::size_t bytes) {
  const Receive receive{tickets_ + 1, from, tag, data, bytes};
  receives_.push_back(receive);
  try {
    statuses_.emplace(receive.ticket, Status{State::pending, from, bytes});
  } catch (...) {
    receives_.pop_back();
    throw;
  }
  if (match(receive)) receives_.pop_back();
  return tickets_ = receive.ticket;
}

Transfers::Status Transfers::status(std::uint64_t ticket) const {
  const auto found = statuses_.find(ticket);
  return found == statuses_.end() ? Status{State::finished, -1, 0} : found->second;
}

Transfers::Status Transfers::status_for_wait(std::uint64_t ticket) const {
  const auto receive = std::find_if(receives_.begin(), receives_.end(),
                                    [&](const Receive& r) { return r.ticket == ticket; });
  if (receive == receives_.end()) return status(ticket);
  const Inbox* last = nullptr;  // a receive from any sender is starved only if all senders are
  for (int from = 0; from < ranks_; ++from) {
    if (from == rank_ || (receive->from >= 0 && receive->from != from)) continue;
    const Inbox& inbox = inboxes_[static_cast<std::size_t>(from)];
    if (!inbox.starved) return status(ticket);
    last = &inbox;
  }
  if (last == nullptr) return status(ticket);
  return {State::starved, static_cast<int>(last - inboxes_.data()), last->header.bytes};
}

void Transfers::detach(std::uint64_t ticket) {
  const auto found = statuses_.find(ticket);
  if (found == statuses_.end()) return;
  found->second.detached = true;
  if (found->second.state != State::pending) statuses_.erase(found);
}

bool Transfers::cancel(std::uint64_t ticket) {
  std::size_t taken = std::erase_if(receives_, [&](const Receive& r) { return r.ticket == ticket; });
  for (auto& outbox : outboxes_)
    taken += std::erase_if(
        outbox, [&](const Send& send) { return send.ticket == ticket && send.written == 0; });
  if (taken != 0) end(ticket, {State::cancelled, status(ticket).peer, 0});
  return taken != 0;
}

void Transfers::end(std::uint64_t ticket, Status status) {
  const auto found = statuses_.find(ticket);  // every pending transfer has one
  if (found->second.detached)
    statuses_.erase(found);
  else
    found->second = status;
}

void Transfers::progress() noexcept {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == rank_) continue;
    push(peer);
    pull(peer);
  }
}

bool Transfers::is_busy() const {
  return !receives_.empty() || std::any_of(outboxes_.begin(), outboxes_.end(),
                                           [](const auto& outbox) { return !outbox.empty(); });
}

bool Transfers::can_progress() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == rank_) continue;
    const auto i = static_cast<std::size_t>(peer);
    if (channel(region_, peer, rank_).written.read() != inboxes_[i].seen) return true;
    if (!outboxes_[i].empty() && channel(region_, rank_, peer).taken.read() != taken_seen_[i])
      return true;
  }
  return false;
}

void Transfers::push(int to) {
  auto& outbox = outboxes_[static_cast<std::size_t>(to)];
  if (outbox.empty()) return;
  Channel& stream = channel(region_, rank_, to);
  char* const bytes = ring(region_, rank_, to);
  const std::size_t size = region_.layout().sizes.channel;
  const std::uint64_t before = stream.written.read();
  std::uint64_t written = before;
  taken_seen_[static_cast<std::size_t>(to)] = stream.taken.read();
  while (!outbox.empty()) {
    Send& send = outbox.front();
    std::size_t room = size - (written - taken_seen_[static_cast<std::size_t>(to)]);
    if (send.written < sizeof(MessageHeader)) {  // headers are not split
      if (room < sizeof(MessageHeader)) break;
      put(bytes, size, written, reinterpret_cast<const char*>(&send.header), sizeof(MessageHeader));
      written += sizeof(MessageHeader);
      send.written = sizeof(MessageHeader);
      room -= sizeof(MessageHeader);
    }
    const std::size_t sent = send.written - sizeof(MessageHeader);
    const std::size_t now = std::min<std::size_t>(room, send.header.bytes - sent);
    put(bytes, size, written, send.data + sent, now);
    written += now;
    send.written += now;
    if (send.written < sizeof(MessageHeader) + send.header.bytes) break;
    end(send.ticket, {State::finished, to, send.header.bytes});
    outbox.pop_front();
  }
  if (written == before) return;
  stream.written.publish(written);
  wake(region_.control(to).peer_wait);
}

void Transfers::pull(int from) {
  Channel& stream = channel(region_, from, rank_);
  const char* const bytes = ring(region_, from, rank_);
  const std::size_t size = region_.layout().sizes.channel;
  Inbox& inbox = inboxes_[static_cast<std::size_t>(from)];
  inbox.seen = stream.written.read();
  const std::uint64_t before = stream.taken.read();
  std::uint64_t taken = before;
  while (true) {
    if (inbox.received < sizeof(MessageHeader)) {
      if (inbox.seen - taken < sizeof(MessageHeader)) break;
      take(bytes, size, taken, reinterpret_cast<char*>(&inbox.header), sizeof(MessageHeader));
      inbox.starved = !begin_message(from, inbox);
      if (inbox.starved) break;
      taken += sizeof(MessageHeader);
      inbox.received = sizeof(MessageHeader);
    }
    const std::size_t received = inbox.received - sizeof(MessageHeader);
    const std::size_t now = std::min<std::size_t>(inbox.seen - taken, inbox.header.bytes - received);
    take(bytes, size, taken, inbox.target + received, now);
    taken += now;
    inbox.received += now;
    if (inbox.received < sizeof(MessageHeader) + inbox.header.bytes) break;
    end_message(from, inbox);
  }
  if (taken == before) return;
  stream.taken.publish(taken);
  wake(region_.control(from).peer_wait);
}

// Finds the receive that matches the current message, or allocates a buffer for it.
bool Transfers::begin_message(int from, Inbox& inbox) {
  const auto wanted = std::find_if(receives_.begin(), receives_.end(), [&](const Receive& r) {
    return r.tag == inbox.header.tag && (r.from == from || r.from < 0);
  });
  if (wanted != receives_.end() && wanted->bytes == inbox.header.bytes) {
    inbox.ticket = wanted->ticket;
    inbox.target = wanted->data;
    receives_.erase(wanted);
    return true;
  }
  if (wanted != receives_.end()) {
    end(wanted->ticket, {State::wrong_size, from, inbox.header.bytes});
    receives_.erase(wanted);
  }
  try {
    inbox.unexpected.push_back(
        {inbox.header, std::make_unique_for_overwrite<char[]>(inbox.header.bytes)});
  } catch (const std::bad_alloc&) {
    return false;
  }
  inbox.ticket = 0;
  inbox.target = inbox.unexpected.back().bytes.get();
  return true;
}

void Transfers::end_message(int from, Inbox& inbox) {
  inbox.received = 0;
  if (inbox.ticket != 0) {
    end(inbox.ticket, {State::finished, from, inbox.header.bytes});
    return;
  }
  // A matching receive may have been posted meanwhile.
  for (auto it = receives_.begin(); it != receives_.end(); ++it) {
    const Receive receive = *it;
    if (match(receive)) {
      receives_.erase(it);
      break;
    }
  }
}

// Completes a receive from a buffered message.
bool Transfers::match(const Receive& receive) {
  for (int from = 0; from < ranks_; ++from) {
    if (receive.from >= 0 && receive.from != from) continue;
    Inbox& inbox = inboxes_[static_cast<std::size_t>(from)];
    const bool incomplete = inbox.received >= sizeof(MessageHeader) && inbox.ticket == 0;
    const auto end_of_complete = inbox.unexpected.end() - (incomplete ? 1 : 0);
    const auto found = std::find_if(inbox.unexpected.begin(), end_of_complete,
                                    [&](const Message& m) { return m.header.tag == receive.tag; });
    if (found == end_of_complete) continue;
    if (found->header.bytes == receive.bytes) {
      if (receive.bytes != 0) std::memcpy(receive.data, found->bytes.get(), receive.bytes);
      end(receive.ticket, {State::finished, from, receive.bytes});
      inbox.unexpected.erase(found);
    } else {
      end(receive.ticket, {State::wrong_size, from, found->header.bytes});
    }
    return true;
  }
  return false;
}

}  // namespace phalanx
