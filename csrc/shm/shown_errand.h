#pragma once

#include <trireme/shm/flag_wait.h>
#include <trireme/shm/rank_block.h>

#include <algorithm>
#include <atomic>
#include <string_view>

namespace trireme::shm {

// Shows an onlooker (doctor.h) what a rank waits for beside the collectives, as long as it lives. A
// rank waits on one thread at a time.
class ShownErrand {
 public:
  ShownErrand(RankBlock& own, std::string_view name) : own_(own) {
    const size_t length = std::min(name.size(), own.errand.size() - 1);
    std::copy_n(name.begin(), length, own.errand.begin());
    own.errand[length] = '\0';
    own.errand_since_ns.store(Clock::now().time_since_epoch().count(), std::memory_order_release);
  }
  ~ShownErrand() { own_.errand_since_ns.store(0, std::memory_order_relaxed); }
  ShownErrand(const ShownErrand&) = delete;
  ShownErrand& operator=(const ShownErrand&) = delete;

 private:
  RankBlock& own_;
};

}  // namespace trireme::shm
