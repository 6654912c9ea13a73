#pragma once

#include <trireme/common/export.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace trireme::remote {

// Does, on a thread of its own, what destructors of any thread leave to be done: they may hold
// locks of the user's, or Python's. Thread-safe.
class TRIREME_API Housekeeping {
 public:
  // Does not throw, and does not wait; returns false to be called again some time later.
  using Chore = std::function<bool()>;

  Housekeeping();
  ~Housekeeping();  // stop()
  Housekeeping(const Housekeeping&) = delete;
  Housekeeping& operator=(const Housekeeping&) = delete;

  // After stop() the chore is dropped.
  void add(Chore chore);
  // Says whether no chore is left, or only such as were not done when they were last called.
  bool is_idle() const;
  // Drops what is left and ends the thread.
  void stop();

 private:
  void work();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Chore> chores_;
  std::deque<Chore> later_;
  bool works_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace trireme::remote
