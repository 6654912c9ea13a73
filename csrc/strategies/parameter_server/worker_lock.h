#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/shm/rank_block.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace trireme::ps {

// [Note: several threads of a worker]
//
// Any thread of a process may use its server: rows of a pipeline, replicas, served calls and the
// user's own do. A worker has one line on the board, one clock and one place per table for what it
// pushes, so its threads take turns: each verb holds the worker's lock.
//
// A thread that waits for other workers to reach a clock, or for the answer of another host, lets
// the worker's other threads in meanwhile (WaitContext::lets_others_in), since the others may wait
// for these. So a verb reads its state, the clock above all, again after such a wait. All other
// waits keep the lock: for a block or a row that a worker is about to step, for room for a message,
// and those of save(), load() and writing(), where all have to stand still.
//
// close() and leave() wait for no other worker: they first end the waits of the worker's other
// threads (end_for_others), and then take the lock.

// A recursive lock that lets one thread of a worker at a time use its side of a server. Taking it
// when free costs some nanoseconds, where a pull of a row costs a few hundred.
class TRIREME_API WorkerLock {
 public:
  // Throws what a signal handler raises while it waits for other threads.
  void lock() { acquire(true); }
  void unlock() noexcept;

  // Ends all other threads' waits for other workers, since this one is about to leave. Any thread
  // may call it, and the next two functions; the first caller counts.
  void end_for_others() noexcept {
    std::thread::id nobody;
    leaver_.compare_exchange_strong(nobody, std::this_thread::get_id());
  }
  bool is_ended_here() const;
  // Throws RuntimeError if another thread has called end_for_others(). `text`: names the wait.
  void check_not_ended(const std::function<std::string()>& text, RankOf where) const;

  // Holds the lock as long as it lives, and handles no signal while it waits for it.
  class Kept {
   public:
    explicit Kept(WorkerLock& lock) : lock_(lock) { lock_.acquire(false); }
    ~Kept() { lock_.unlock(); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

   private:
    WorkerLock& lock_;
  };
  // Releases the lock as long as it lives, if this thread has it.
  class Gap {
   public:
    explicit Gap(WorkerLock& lock);
    ~Gap();
    Gap(const Gap&) = delete;
    Gap& operator=(const Gap&) = delete;

   private:
    WorkerLock& lock_;
    int64_t depth_ = 0;
  };

 private:
  bool is_mine() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  bool try_acquire();
  void acquire(bool hears_signals);
  void wait(bool hears_signals);
  void release() noexcept;

  std::atomic<std::thread::id> owner_{};
  int64_t depth_ = 0;  // how often the owner has taken the lock
  shm::Futex futex_;
  std::atomic<std::thread::id> leaver_{};
};

}  // namespace trireme::ps
