// A thread that makes progress for a rank while its caller computes.
//
// It pays where there are more cores than ranks; otherwise it would compete with the callers. The
// thread makes progress like any caller, under the engine's lock. Three rules keep it out of the
// callers' way:
//
//   inbox        A large operation holds the engine's lock for milliseconds. A caller that issues the
//                next operation meanwhile leaves it in the inbox, whose lock is held briefly; whoever
//                makes progress takes it from there. If the engine's lock is free, the caller announces
//                the operation itself and executes it if it is small: waking a thread takes longer.
//   yielding     A caller that waits does the work itself. The thread releases the lock after the
//                current step and stays away while there are callers.
//   driver wait  The thread sleeps in a slot of its own while nothing is queued or a caller does the
//                work, so that peers do not wake it. It sleeps in the rank's `peer_wait`, beside
//                callers, only while it is blocked on a peer.
//
// Sleeping follows `sync.hpp`: whoever changes what a sleeper checks does so in sequentially
// consistent order and then calls `wake`.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "engine.hpp"

namespace phalanx {

class Driver {
 public:
  Driver(Engine& engine, const SpinPolicy& policy);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  void start();

  // Ends the thread after its current step; callers do the work from then on. Does nothing in a forked
  // child, which has no thread.
  void stop();

  bool is_running() const { return running_.load(std::memory_order_seq_cst); }

  // Takes an operation without waiting for the engine's lock and returns its ticket. If it throws, it
  // has changed nothing.
  std::uint64_t submit(Request request);

  bool has_submissions() const { return submitted_.load(std::memory_order_seq_cst) != 0; }

  // These expect the engine's lock to be held.
  void accept_submissions() noexcept;  // moves the inbox to the engine's queue
  void update_unfinished() noexcept;
  void reset_tickets(std::uint64_t last);  // the inbox must be empty

  // Makes the thread check again, wherever it sleeps.
  void notify();

  // While one exists, a caller has the engine's lock or waits for it, and the thread stays away.
  class CallerScope {
   public:
    explicit CallerScope(Driver* driver);
    ~CallerScope();
    CallerScope(const CallerScope&) = delete;
    CallerScope& operator=(const CallerScope&) = delete;

   private:
    Driver* const driver_;
  };

 private:
  // The state after the thread has made all possible progress.
  struct Progress {
    bool blocked = false;  // on a peer
    bool transferring = false;
    Engine::BlockedOn blocked_on;
    std::uint64_t notifications = 0;
  };

  void run();
  Progress make_progress();
  void wait_for_peers(const Progress& last);
  bool can_progress(const Progress& last);
  bool should_run() const;
  bool must_stop() const { return stop_.load(std::memory_order_seq_cst); }
  bool has_callers() const { return callers_.load(std::memory_order_seq_cst) != 0; }

  Engine& engine_;
  const SpinPolicy spin_policy_;
  const pid_t owner_pid_;  // the process that has the thread
  WaitSlot driver_wait_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> running_{false};
  std::atomic<bool> unfinished_{false};  // set under either lock, cleared under both
  std::atomic<int> callers_{0};
  std::atomic<std::uint64_t> notifications_{0};

  std::mutex inbox_mutex_;  // protects the next four; taken after the engine's lock
  Engine::Operations inbox_;
  Engine::Operations spare_;
  std::uint64_t tickets_;
  std::atomic<std::size_t> submitted_{0};  // the length of the inbox, for readers without the lock

  std::unique_ptr<std::thread> thread_;  // a pointer, so that a forked child can abandon it
};

}  // namespace phalanx
