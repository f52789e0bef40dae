// A thread that does a rank's share while its caller computes.
//
// It pays where there are more cores than ranks; on as many it would only compete with the callers,
// and an engine does without it. The thread makes progress like any caller: it takes the engine's
// lock and does what can be done. Three things keep it from being in a caller's way:
//
//   the inbox     A large share is done under the engine's lock, for milliseconds. A caller that
//                 issues the next operation meanwhile leaves it in the inbox, whose lock is held
//                 for moments; whoever makes progress takes it from there. If the engine's lock is
//                 free the caller announces the operation itself, and does the share of a small
//                 one; to wake a thread for that would take longer.
//   stepping back A caller that waits does the work itself, on a core that is awake; the thread
//                 leaves it the lock after the share at hand and stays away until it has gone. So
//                 it does for callers that need the lock for something else.
//   the cot       Where the thread sleeps while nothing is queued, or a caller does the work. It is
//                 not the rank's bed, so peers do not ring for it. In bed, beside callers, it
//                 sleeps only while it waits for a peer.
//
// Sleeping follows `sync.hpp`: whoever changes what a sleeper looks at does so in sequentially
// consistent order, and then rings. Any number of threads may sleep in one bed: `sleeping` counts
// them, each takes note of the bell before it is counted, and a ring wakes all.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "engine.hpp"

namespace phalanx {

class Driver {
 public:
  Driver(Engine& engine, const Pace& pace);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  void start();

  // Ends the thread, at most one share later; callers do the work from then on. In a forked child,
  // where there is no thread to end, it does nothing.
  void stop();

  bool runs() const { return running_.load(std::memory_order_seq_cst); }

  // Takes an operation without waiting for a share under way; returns its ticket. Throws, with
  // nothing done, where there is no memory for it.
  std::uint64_t hand_in(Request request);

  bool has_mail() const { return mail_.load(std::memory_order_seq_cst) != 0; }

  // The engine's lock is held around these.
  void take_in() noexcept;  // moves what was handed in to the engine's queue
  void note() noexcept;     // takes note of whether anything is left to do
  void count_from(std::uint64_t ticket);  // gives out the next ones; nothing may be handed in

  // Has the thread look again, wherever it sleeps.
  void nudge();

  // While there is one, a caller has the lock or waits for it, and the thread stays away.
  class Caller {
   public:
    explicit Caller(Driver* driver);
    ~Caller();
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

   private:
    Driver* const driver_;
  };

 private:
  // How things stood when the thread could do no more.
  struct View {
    bool blocked = false;  // there is something to do, and it takes a peer to go on
    bool transferring = false;
    Engine::Watch watch;
    std::uint64_t nudges = 0;
  };

  void run();
  void drive();
  View turn();
  void sleep_in_bed(const View& view);
  bool has_news(const View& view);
  bool is_wanted() const;
  bool must_stop() const { return stop_.load(std::memory_order_seq_cst); }
  bool is_called() const { return callers_.load(std::memory_order_seq_cst) != 0; }

  Engine& engine_;
  const Pace pace_;
  const pid_t maker_;  // the process that has the thread
  Bed cot_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> running_{false};
  std::atomic<bool> unfinished_{false};  // written under either lock when true, both when false
  std::atomic<int> callers_{0};
  std::atomic<std::uint64_t> nudges_{0};

  std::mutex inbox_mutex_;  // over the next four; taken after the engine's lock, never before
  Engine::Operations inbox_;
  Engine::Operations spare_;  // places for what will be handed in
  std::uint64_t tickets_;
  std::atomic<std::size_t> mail_{0};  // the length of the inbox, for those who only look

  std::unique_ptr<std::thread> thread_;  // a pointer, for a forked child must leave it alone
};

}  // namespace phalanx
