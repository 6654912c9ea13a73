#pragma once

#include <trireme/common/export.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

namespace trireme::remote {

// Runs, on a thread of its own, chores that destructors of any thread leave to it, since these may
// hold locks of the user's, or Python's. If a chore runs user code that waits, another thread runs
// the rest. Thread-safe.
class TRIREME_API DeferredDestruction {
 public:
  // A piece of work that does not throw; it returns false to be called again later.
  using Chore = std::function<bool()>;

  DeferredDestruction();
  ~DeferredDestruction();  // stop()
  DeferredDestruction(const DeferredDestruction&) = delete;
  DeferredDestruction& operator=(const DeferredDestruction&) = delete;

  // Queues a chore; drops it after stop().
  void add(Chore chore);
  // Starts another thread if chores wait for one that takes long. Called every shm::kLookEvery.
  void look();
  // Returns whether no chore is left but those that returned false.
  bool is_idle() const;
  // Drops the chores that are left and ends the threads.
  void stop();

 private:
  void work();
  void start_thread();
  void run_first(std::unique_lock<std::mutex>& lock);
  void end_this_thread(std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Chore> chores_;
  std::deque<Chore> later_;
  std::chrono::steady_clock::time_point again_at_;  // for `later_`
  std::list<std::thread> threads_;
  std::list<std::thread> ended_;  // the last thread that ended itself
  int64_t working_ = 0;           // threads with a chore
  uint64_t begun_ = 0;            // counts chores
  uint64_t seen_begun_ = 0;       // at the last look()
  bool stopping_ = false;
};

}  // namespace trireme::remote
