#pragma once

#include <trireme/common/export.h>
#include <trireme/common/spin.h>
#include <trireme/shm/rank_block.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace trireme::shm {

using Clock = std::chrono::steady_clock;

// Asked while a rank sleeps whether its wait has become pointless.
struct Watch {
  virtual ~Watch() = default;
  virtual bool pointless() = 0;
  virtual void look_around() {}             // every kLookEvery; what it throws ends the wait
  [[noreturn]] virtual void give_up() = 0;  // pointless, and the counter has not come anyway
  [[noreturn]] virtual void overdue() = 0;  // the deadline has passed
};

// Counts this thread among those that sleep on a futex, for as long as it lives. A publisher stores
// its counter, then reads `sleepers`; a sleeper counts itself, then reads the counter, then calls
// sleep_on with the `rung` of before. All of these are sequentially consistent, so one of the two
// sees the other.
class TRIREME_API Asleep {
 public:
  explicit Asleep(Futex& futex) : futex_(futex) {
    futex_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Asleep() { futex_.sleepers.fetch_sub(1, std::memory_order_relaxed); }
  Asleep(const Asleep&) = delete;
  Asleep& operator=(const Asleep&) = delete;

 private:
  Futex& futex_;
};

// How often a sleeper checks whether its wait still makes sense.
constexpr std::chrono::milliseconds kLookEvery{50};

// Sleeps until the futex is rung after `seen` was read, kLookEvery at most; may return at once.
TRIREME_API void sleep_on(Futex& futex, uint32_t seen);

// Returns how long a rank lets others run before it sleeps. `ranks` counts those of this host.
TRIREME_API std::chrono::microseconds patience_of(int64_t ranks);

// Waits until a counter of a peer has reached a number: a few pauses (the peer is about to write),
// then letting others run for a bounded time (ranks may outnumber CPUs), then asleep on its own
// futex, awake every 50 ms to check whether the peer still lives. Spinning alone is a thousand
// times slower with more ranks than cores; sleeping at once costs 20 to 50 us of wake-up.
class TRIREME_API FlagWait {
 public:
  // `futex` is the waiting rank's own.
  FlagWait(Futex& futex, int64_t ranks) : futex_(futex), patience_(patience_of(ranks)) {}

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

  Futex& futex_;
  std::chrono::microseconds patience_;
};

// Wakes the threads that sleep on the futex. Called after a sequentially consistent store to a
// counter that they may wait for.
TRIREME_API void ring(Futex& futex);

}  // namespace trireme::shm
