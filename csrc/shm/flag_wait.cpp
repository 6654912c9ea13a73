#include <trireme/shm/flag_wait.h>

#include <trireme/common/cpus.h>

#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace trireme::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kYieldFor{100};
constexpr microseconds kYieldOversubscribed{10};
constexpr milliseconds kLookEvery{50};

// On the word itself, which other processes map (not FUTEX_PRIVATE).
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, milliseconds at_most) {
  const timespec timeout{at_most.count() / 1000, at_most.count() % 1000 * 1'000'000};
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
            0);
}

// Counts this thread as asleep, also when a look throws.
class Asleep {
 public:
  explicit Asleep(std::atomic<uint32_t>& sleepers) : sleepers_(sleepers) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Asleep() { sleepers_.fetch_sub(1, std::memory_order_relaxed); }
  Asleep(const Asleep&) = delete;
  Asleep& operator=(const Asleep&) = delete;

 private:
  std::atomic<uint32_t>& sleepers_;
};

}  // namespace

FlagWait::FlagWait(RankBlock& own, int64_t ranks)
    : own_(own), yield_for_(ranks <= usable_cpus() ? kYieldFor : kYieldOversubscribed) {}

void FlagWait::wait_longer(const std::atomic<uint64_t>& counter, uint64_t target,
                           Clock::time_point deadline, Watch& watch) {
  const auto come = [&] { return counter.load(std::memory_order_seq_cst) >= target; };
  const Clock::time_point yield_until = Clock::now() + yield_for_;
  do {
    if (come()) return;
    ::sched_yield();
  } while (Clock::now() < yield_until);

  // A publisher stores its counter, then reads `sleepers`; this counts itself asleep, then reads
  // the counter. All four are sequentially consistent, so one of the two sees the other.
  const Asleep asleep(own_.sleepers);
  for (;;) {
    const uint32_t seen = own_.bell.load(std::memory_order_seq_cst);
    if (come()) return;
    futex_wait(own_.bell, seen, kLookEvery);
    if (come()) return;
    // What a peer published before it died counts.
    const bool pointless = watch.pointless();
    if (come()) return;
    if (pointless) watch.give_up();
    if (Clock::now() >= deadline) watch.overdue();
  }
}

void ring(RankBlock& peer) {
  if (peer.sleepers.load(std::memory_order_seq_cst) == 0) return;
  peer.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(peer.bell);
}

}  // namespace trireme::shm
