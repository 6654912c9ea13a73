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

// Does, on a thread of its own, what destructors of any thread leave to be done: they may hold
// locks of the user's, or Python's. Where that runs code of the user's which waits, another thread
// does the rest. Thread-safe.
class TRIREME_API Housekeeping {
 public:
  // Does not throw; returns false to be called again some time later.
  using Chore = std::function<bool()>;

  Housekeeping();
  ~Housekeeping();  // stop()
  Housekeeping(const Housekeeping&) = delete;
  Housekeeping& operator=(const Housekeeping&) = delete;

  // After stop() the chore is dropped.
  void add(Chore chore);
  // Sees to it that no chore waits for one that takes long. Called every shm::kLookEvery.
  void look();
  // Says whether no chore is left, or only such as were not done when they were last called.
  bool is_idle() const;
  // Drops what is left and ends the thread.
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
  std::chrono::steady_clock::time_point again_at_;  // for these
  std::list<std::thread> threads_;
  std::list<std::thread> ended_;  // the last one that was not needed any more
  int64_t working_ = 0;           // threads with a chore
  uint64_t begun_ = 0;            // counts chores
  uint64_t seen_begun_ = 0;       // what the last look saw
  bool stopping_ = false;
};

}  // namespace trireme::remote
