#include <trireme/shm/flag_wait.h>

#include <trireme/common/cpus.h>

#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace trireme::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kYieldFor{100};
constexpr microseconds kYieldOversubscribed{10};

// Waits on the word itself, which other processes map (not FUTEX_PRIVATE).
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, milliseconds at_most) {
  const timespec timeout{at_most.count() / 1000, at_most.count() % 1000 * 1'000'000};
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
            0);
}

}  // namespace

void sleep_on(Futex& futex, uint32_t seen) { futex_wait(futex.rung, seen, kLookEvery); }

microseconds patience_of(int64_t ranks) {
  return ranks <= usable_cpus() ? kYieldFor : kYieldOversubscribed;
}

void FlagWait::wait_longer(const std::atomic<uint64_t>& counter, uint64_t target,
                           Clock::time_point deadline, Watch& watch) {
  const auto come = [&] { return counter.load(std::memory_order_seq_cst) >= target; };
  LookTimer looks;
  FutexWait(futex_, patience_).until(come, FutexWait::NeverOver{}, [&](uint32_t seen) {
    sleep_on(futex_, seen);
    if (come()) return;
    // Values that a peer published before it died count.
    const bool pointless = watch.pointless();
    if (come()) return;
    if (pointless) watch.fail();
    const Clock::time_point now = Clock::now();
    if (now >= deadline) watch.overdue();
    looks.call_if_due(now, [&] { watch.look_around(); });
  });
}

void ring(Futex& futex) {
  if (futex.sleepers.load(std::memory_order_seq_cst) == 0) return;
  futex.rung.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(futex.rung);
}

}  // namespace trireme::shm
