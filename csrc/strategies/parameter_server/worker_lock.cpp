#include <trireme/strategies/parameter_server/worker_lock.h>

#include <trireme/common/interruption.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/strategies/parameter_server/options.h>

#include <c10/util/Exception.h>

#include <utility>

// See [Note: several threads of a worker] in worker_lock.h.

namespace trireme::ps {
namespace {

// The number of tries before it sleeps; most verbs are over by then.
constexpr int kLooksForLock = 200;

}  // namespace

bool WorkerLock::try_acquire() {
  std::thread::id nobody;
  return owner_.compare_exchange_strong(nobody, std::this_thread::get_id(),
                                        std::memory_order_seq_cst);
}

void WorkerLock::acquire(bool hears_signals) {
  if (!is_mine() && !try_acquire()) wait(hears_signals);
  ++depth_;
}

void WorkerLock::wait(bool hears_signals) {
  const auto look = [this] { return try_acquire(); };
  if (shm::spin(kLooksForLock, look)) return;
  shm::LookTimer signals;
  shm::FutexWait(futex_).until(look, [&] {
    if (hears_signals) signals.call_if_due(shm::Clock::now(), check_interruption);
    return false;
  });
}

void WorkerLock::release() noexcept {
  owner_.store(std::thread::id(), std::memory_order_seq_cst);
  shm::ring(futex_);
}

void WorkerLock::unlock() noexcept {
  if (--depth_ == 0) release();
}

bool WorkerLock::is_ended_here() const {
  const std::thread::id leaver = leaver_;
  return leaver != std::thread::id() && leaver != std::this_thread::get_id();
}

void WorkerLock::check_not_ended(const std::function<std::string()>& text, RankOf where) const {
  TORCH_CHECK(!is_ended_here(),
              error_text(kPsArea,
                         text() + ": got a server that another thread has closed or left "
                                  "meanwhile, expected an open one",
                         where, "Call close() or leave() after the last use."));
}

WorkerLock::Gap::Gap(WorkerLock& lock) : lock_(lock) {
  if (!lock_.is_mine()) return;
  depth_ = std::exchange(lock_.depth_, 0);
  lock_.release();
}

WorkerLock::Gap::~Gap() {
  if (depth_ == 0) return;
  lock_.acquire(false);
  lock_.depth_ = depth_;
}

}  // namespace trireme::ps
