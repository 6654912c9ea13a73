#pragma once

#include <trireme/common/export.h>
#include <trireme/common/spin.h>
#include <trireme/shm/rank_block.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace trireme::shm {

using Clock = std::chrono::steady_clock;

// Asked while a rank sleeps whether waiting on has become pointless.
struct Watch {
  virtual ~Watch() = default;
  virtual bool pointless() = 0;
  [[noreturn]] virtual void give_up() = 0;  // pointless, and the counter has not come after all
  [[noreturn]] virtual void overdue() = 0;  // the deadline has passed
};

// How a rank waits until a counter of a peer has come to a number: a few pauses (the peer is about
// to write), then letting others run for a bounded time (ranks may outnumber CPUs), then asleep on
// its own bell, awake every 50 ms to look whether the peer still lives. Spinning alone is a
// thousand times slower with more ranks than cores; sleeping at once costs 20 to 50 us of wake-up.
class TRIREME_API FlagWait {
 public:
  // `bell` and `sleepers` of the waiting rank's own block. `ranks` is how many wait on this host.
  FlagWait(RankBlock& own, int64_t ranks);

  void until(const std::atomic<uint64_t>& counter, uint64_t target, Clock::time_point deadline,
             Watch& watch) {
    for (int i = 0; i < kPauses; ++i) {
      if (counter.load(std::memory_order_acquire) >= target) return;
      spin_pause();
    }
    wait_longer(counter, target, deadline, watch);
  }

 private:
  static constexpr int kPauses = 100;
  void wait_longer(const std::atomic<uint64_t>& counter, uint64_t target,
                   Clock::time_point deadline, Watch& watch);

  RankBlock& own_;
  std::chrono::microseconds yield_for_;
};

// Wakes `peer` if it sleeps. Called after a sequentially consistent store to whatever counter the
// peer may wait for.
void ring(RankBlock& peer);

}  // namespace trireme::shm
