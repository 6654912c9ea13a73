#include <trireme/strategies/remote/deferred_destruction.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <pthread.h>
#include <system_error>
#include <utility>

namespace trireme::remote {
namespace {
constexpr std::chrono::milliseconds kTryAgain{20};
// The most chores that may be stuck in user code at one time before they hold up all others.
constexpr size_t kMostThreads = 64;
}  // namespace

DeferredDestruction::DeferredDestruction() {
  const std::lock_guard lock(mutex_);
  start_thread();
}

DeferredDestruction::~DeferredDestruction() { stop(); }

void DeferredDestruction::start_thread() {
  threads_.emplace_back([this] { work(); });
  ::pthread_setname_np(threads_.back().native_handle(), "trireme-keep");
}

void DeferredDestruction::add(Chore chore) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  chores_.push_back(std::move(chore));
  changed_.notify_one();
}

void DeferredDestruction::look() {
  const std::lock_guard lock(mutex_);
  const bool all_work = working_ == static_cast<int64_t>(threads_.size());
  const bool nothing_moves = !chores_.empty() && all_work && begun_ == seen_begun_;
  seen_begun_ = begun_;
  if (!nothing_moves || stopping_ || threads_.size() >= kMostThreads) return;
  try {
    start_thread();
  } catch (const std::system_error&) {  // no thread to be had: the next look() tries again
  }
}

bool DeferredDestruction::is_idle() const {
  const std::lock_guard lock(mutex_);
  return chores_.empty() && working_ == 0;
}

void DeferredDestruction::stop() {
  std::list<std::thread> ended;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    ended.swap(threads_);
    ended.splice(ended.end(), ended_);
  }
  for (std::thread& thread : ended) thread.join();
}

void DeferredDestruction::run_first(std::unique_lock<std::mutex>& lock) {
  Chore chore = std::move(chores_.front());
  chores_.pop_front();
  ++working_;
  ++begun_;
  lock.unlock();
  const bool is_done = chore();
  if (is_done) chore = nullptr;  // its captures are destroyed without the lock
  lock.lock();
  --working_;
  if (is_done) return;
  if (later_.empty()) again_at_ = std::chrono::steady_clock::now() + kTryAgain;
  later_.push_back(std::move(chore));
}

// Ends this thread, and joins the one that ended before it, so that at most one is left to join. A
// join may take its time, since a language frees its thread state then.
void DeferredDestruction::end_this_thread(std::unique_lock<std::mutex>& lock) {
  const auto own = std::find_if(threads_.begin(), threads_.end(), [](const std::thread& thread) {
    return thread.get_id() == std::this_thread::get_id();
  });
  std::list<std::thread> before = std::exchange(ended_, {});
  ended_.splice(ended_.end(), threads_, own);
  lock.unlock();
  for (std::thread& thread : before) thread.join();
}

void DeferredDestruction::work() {
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return stopping_ || !chores_.empty(); };
  while (!stopping_) {
    if (!later_.empty() && std::chrono::steady_clock::now() >= again_at_) {
      chores_.insert(chores_.end(), std::make_move_iterator(later_.begin()),
                     std::make_move_iterator(later_.end()));
      later_.clear();
    }
    if (!chores_.empty()) {
      run_first(lock);
    } else if (later_.empty() && static_cast<int64_t>(threads_.size()) - working_ > 1) {
      return end_this_thread(lock);  // another thread was stuck for a while
    } else if (later_.empty()) {
      changed_.wait(lock, has_work);
    } else {
      changed_.wait_until(lock, again_at_, has_work);
    }
  }
}

}  // namespace trireme::remote
