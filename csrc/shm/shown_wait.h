#pragma once

#include <trireme/shm/flag_wait.h>
#include <trireme/shm/rank_block.h>

#include <algorithm>
#include <atomic>
#include <string_view>

namespace trireme::shm {

// Shows an onlooker (doctor.h) what a rank waits for beside the collectives, as long as it lives.
// If several threads of a rank wait, the wait of the first is shown.
class ShownWait {
 public:
  ShownWait(RankBlock& own, std::string_view name)
      : own_(own), is_shown_(!own.wait_is_shown.exchange(true)) {
    if (!is_shown_) return;
    const size_t length = std::min(name.size(), own.context.size() - 1);
    std::copy_n(name.begin(), length, own.context.begin());
    own.context[length] = '\0';
    own.wait_since_ns.store(Clock::now().time_since_epoch().count(), std::memory_order_release);
  }
  ~ShownWait() {
    if (!is_shown_) return;
    own_.wait_since_ns.store(0, std::memory_order_relaxed);
    own_.wait_is_shown = false;
  }
  ShownWait(const ShownWait&) = delete;
  ShownWait& operator=(const ShownWait&) = delete;

 private:
  RankBlock& own_;
  bool is_shown_;
};

}  // namespace trireme::shm
