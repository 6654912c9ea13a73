#include <trireme/common/thread_turn.h>

#include <trireme/common/error.h>
#include <trireme/common/interruption.h>

namespace trireme {
namespace {

const std::shared_ptr<const bool>& this_thread() {
  static thread_local const auto token = std::make_shared<const bool>(true);
  return token;
}

}  // namespace

bool ThreadTurn::is_own_locked() const { return owner_.lock() == this_thread(); }

bool ThreadTurn::try_take_locked() {
  if (!owner_.expired() && !is_own_locked()) return false;
  owner_ = this_thread();
  return true;
}

bool ThreadTurn::take() {
  std::unique_lock lock(mutex_);
  if (is_own_locked()) return false;
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  while (!try_take_locked()) {
    TORCH_CHECK(
        std::chrono::steady_clock::now() < deadline,
        error_text(area_,
                   c10::str("got a pass that has waited ", timeout_.count() / 1000.0,
                            " s for one of another thread, expected that it ends"),
                   {},
                   "See what that thread does. A forward that KeyboardInterrupt has left ends with "
                   "the next one of the same thread."));
    if (is_free_.wait_for(lock, kLookAround) == std::cv_status::no_timeout) continue;
    lock.unlock();
    check_interruption();
    lock.lock();
  }
  return true;
}

bool ThreadTurn::try_take() {
  const std::lock_guard lock(mutex_);
  return try_take_locked();
}

bool ThreadTurn::is_own() const {
  const std::lock_guard lock(mutex_);
  return is_own_locked();
}

void ThreadTurn::give_back() noexcept {
  {
    const std::lock_guard lock(mutex_);
    owner_.reset();
  }
  is_free_.notify_one();
}

}  // namespace trireme
