// A peer's process, watched through a descriptor that becomes readable when it ends (a pidfd). All
// engines of this process that have a rank in it share one, and the last of them closes it.

#pragma once

#include <poll.h>
#include <unistd.h>

namespace phalanx {

class Process {
 public:
  explicit Process(int pidfd) : pidfd_(pidfd) {}  // which it closes
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() { ::close(pidfd_); }

  bool has_ended() const {
    pollfd poll{pidfd_, POLLIN, 0};
    return ::poll(&poll, 1, 0) == 1;
  }

 private:
  const int pidfd_;
};

}  // namespace phalanx
