#include <trireme/strategies/remote/housekeeping.h>

#include <chrono>
#include <iterator>
#include <pthread.h>
#include <utility>

namespace trireme::remote {
namespace {
constexpr std::chrono::milliseconds kTryAgain{20};
}  // namespace

Housekeeping::Housekeeping() : thread_([this] { work(); }) {
  ::pthread_setname_np(thread_.native_handle(), "trireme-keep");
}

Housekeeping::~Housekeeping() { stop(); }

void Housekeeping::add(Chore chore) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  chores_.push_back(std::move(chore));
  changed_.notify_one();
}

bool Housekeeping::is_idle() const {
  const std::lock_guard lock(mutex_);
  return chores_.empty() && !works_;
}

void Housekeeping::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Housekeeping::work() {
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return stopping_ || !chores_.empty(); };
  while (!stopping_) {
    if (later_.empty()) {
      changed_.wait(lock, has_work);
    } else {
      changed_.wait_for(lock, kTryAgain, has_work);
    }
    if (stopping_) break;
    std::deque<Chore> now = std::exchange(later_, {});
    now.insert(now.end(), std::make_move_iterator(chores_.begin()),
               std::make_move_iterator(chores_.end()));
    chores_.clear();
    works_ = true;
    lock.unlock();
    std::deque<Chore> left;
    for (Chore& chore : now)
      if (!chore()) left.push_back(std::move(chore));
    now.clear();
    lock.lock();
    works_ = false;
    later_ = std::move(left);
  }
}

}  // namespace trireme::remote
