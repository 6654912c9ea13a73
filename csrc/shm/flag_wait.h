#pragma once

#include <trireme/common/export.h>
#include <trireme/common/spin.h>
#include <trireme/shm/rank_block.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace trireme::shm {

using Clock = std::chrono::steady_clock;

// Asked while a rank sleeps whether its wait has become pointless.
struct Watch {
  virtual ~Watch() = default;
  virtual bool pointless() = 0;
  virtual void look_around() {}             // every kLookEvery; what it throws ends the wait
  [[noreturn]] virtual void fail() = 0;     // pointless, and the counter has not come anyway
  [[noreturn]] virtual void overdue() = 0;  // the deadline has passed
};

// How often a sleeper checks whether its wait still makes sense.
constexpr std::chrono::milliseconds kLookEvery{50};

// A timer for what a wait does every kLookEvery.
class LookTimer {
 public:
  explicit LookTimer(Clock::time_point first = Clock::now() + kLookEvery) : due_(first) {}

  template <typename Look>
  void call_if_due(Clock::time_point now, const Look& look) {
    if (now < due_) return;
    look();
    due_ = Clock::now() + kLookEvery;
  }

 private:
  Clock::time_point due_;
};

// The result of one look of a wait: kAll ends the wait; after kSome more is likely to come at once.
enum class Found { kNothing, kSome, kAll };
constexpr Found as_found(Found found) { return found; }
constexpr Found as_found(bool is_all) { return is_all ? Found::kAll : Found::kNothing; }
// Calls `move`, which returns whether anything moved, and then `enough`.
template <typename Move, typename Enough>
Found found_after(const Move& move, const Enough& enough) {
  const bool moved = move();
  if (enough()) return Found::kAll;
  return moved ? Found::kSome : Found::kNothing;
}

// Looks up to `looks` times, since what a running thread is about to do takes less time than a
// sleep. Returns whether it found all.
template <typename Look>
bool spin(int looks, const Look& look) {
  for (int i = 0; i < looks; ++i) {
    if (as_found(look()) == Found::kAll) return true;
    spin_pause();
  }
  return false;
}

// Returns how long a rank lets others run before it sleeps. `ranks` counts those of this host.
TRIREME_API std::chrono::microseconds patience_of(int64_t ranks);

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

// Sleeps until the futex is rung after `seen` was read, kLookEvery at most; may return at once.
TRIREME_API void sleep_on(Futex& futex, uint32_t seen);

// Wakes the threads that sleep on the futex. Called after a sequentially consistent store to a
// counter that they may wait for.
TRIREME_API void ring(Futex& futex);

// Waits for something that other threads bring about and then ring a futex for.
class FutexWait {
 public:
  // `yields`: how long it lets others run, after each look that found some, before it sleeps.
  explicit FutexWait(Futex& futex, std::chrono::microseconds yields = {})
      : futex_(futex), yields_(yields) {}

  struct NeverOver {
    bool operator()() const { return false; }
  };
  // Waits until `look`, which takes what has come and returns Found or bool, has found all. Returns
  // false if `is_over` ends the wait before: asked after each look, so that it may look around
  // itself. What the two throw ends the wait, too.
  template <typename Look, typename IsOver = NeverOver>
  bool until(const Look& look, const IsOver& is_over = {}) const {
    return until(look, is_over, [this](uint32_t seen) { sleep_on(futex_, seen); });
  }
  // `sleep` calls sleep_on(), and does what is to be done before and after.
  template <typename Look, typename IsOver, typename Sleep>
  bool until(const Look& look, const IsOver& is_over, const Sleep& sleep) const {
    for (;;) {
      Clock::time_point yield_until = Clock::now() + yields_;
      while (Clock::now() < yield_until) {
        const Found found = as_found(look());
        if (found == Found::kAll) return true;
        if (is_over()) return false;
        if (found == Found::kSome) yield_until = Clock::now() + yields_;
        std::this_thread::yield();
      }
      const Asleep asleep(futex_);
      for (Found found = Found::kNothing; found == Found::kNothing;) {
        const uint32_t seen = futex_.rung.load(std::memory_order_seq_cst);
        found = as_found(look());
        if (found == Found::kAll) return true;
        if (is_over()) return false;
        if (found == Found::kNothing) sleep(seen);
      }
    }
  }

 private:
  Futex& futex_;
  std::chrono::microseconds yields_;
};

// The number of looks of a wait for a peer that is about to write.
constexpr int kLooksAwake = 100;

// Waits until a counter of a peer has reached a number: a few looks (the peer is about to write),
// then letting others run for a bounded time (ranks may outnumber CPUs), then asleep on its own
// futex, awake every 50 ms to check whether the peer still lives. Spinning alone is a thousand
// times slower with more ranks than cores; sleeping at once costs 20 to 50 us of wake-up.
class TRIREME_API FlagWait {
 public:
  // `futex` is the waiting rank's own.
  FlagWait(Futex& futex, int64_t ranks) : futex_(futex), patience_(patience_of(ranks)) {}

  void until(const std::atomic<uint64_t>& counter, uint64_t target, Clock::time_point deadline,
             Watch& watch) {
    const auto come = [&] { return counter.load(std::memory_order_acquire) >= target; };
    if (!spin(kLooksAwake, come)) wait_longer(counter, target, deadline, watch);
  }

 private:
  void wait_longer(const std::atomic<uint64_t>& counter, uint64_t target,
                   Clock::time_point deadline, Watch& watch);

  Futex& futex_;
  std::chrono::microseconds patience_;
};

}  // namespace trireme::shm
