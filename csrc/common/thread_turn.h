#pragma once

#include <trireme/common/export.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace trireme {

// The turn of one thread at a time. A thread that has ended has it no longer.
class TRIREME_API ThreadTurn {
 public:
  // `area` is that of take()'s errors.
  explicit ThreadTurn(std::string area,
                      std::chrono::milliseconds timeout = std::chrono::minutes(30))
      : area_(std::move(area)), timeout_(timeout) {}

  // Waits until no other thread has it, and meanwhile lets signal handlers run. Called without the
  // GIL. Returns whether this thread has not had it before. Throws c10::Error if another thread
  // still has it after `timeout`.
  bool take();
  // Takes it, unless another thread has it.
  bool try_take();
  // Returns whether this thread has it.
  bool is_own() const;
  // Gives the turn back, whichever thread has it. Any thread may call it.
  void give_back() noexcept;

  // Takes the turn while it lives; leaves it to a thread that has it anyway.
  class Guard {
   public:
    explicit Guard(ThreadTurn& turn) : turn_(turn), took_(turn.take()) {}
    ~Guard() {
      if (took_) turn_.give_back();
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    ThreadTurn& turn_;
    const bool took_;
  };

 private:
  bool is_own_locked() const;
  bool try_take_locked();

  const std::string area_;
  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::condition_variable is_free_;
  std::weak_ptr<const bool> owner_;  // gone with its thread
};

}  // namespace trireme
