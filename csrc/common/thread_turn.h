#pragma once

#include <trireme/common/export.h>

#include <condition_variable>
#include <memory>
#include <mutex>

namespace trireme {

// The turn of one thread at a time. A thread that has ended has it no longer.
class TRIREME_API ThreadTurn {
 public:
  // Waits until no other thread has it, and for as long lets signal handlers run. Called without
  // the GIL. Returns whether this thread has not had it before.
  bool take();
  // Takes it, unless another thread has it.
  bool try_take();
  // Says whether this thread has it.
  bool is_own() const;
  // Called when this thread has it, by whichever thread.
  void give_back() noexcept;

  // Has the turn while it lives; leaves it to a thread that has it anyway.
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

  mutable std::mutex mutex_;
  std::condition_variable is_free_;
  std::weak_ptr<const bool> owner_;  // gone with its thread
};

}  // namespace trireme
