#include <trireme/comm/backend/queue.h>

#include <trireme/comm/backend/work_future.h>
#include <trireme/common/cpus.h>
#include <trireme/common/duration.h>
#include <trireme/common/error.h>
#include <trireme/common/interruption.h>
#include <trireme/shm/flag_wait.h>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <pthread.h>
#include <utility>

namespace trireme {
namespace {

// How long the queue's thread leaves an operation to a thread that waits for it, if no CPU is free.
// Most backwards end sooner; a longer one gets its first buckets reduced meanwhile.
constexpr std::chrono::milliseconds kPatience{50};

// The queue whose callbacks this thread runs, and the one whose operation it runs.
thread_local const void* calls_back_for = nullptr;
thread_local const void* operates_for = nullptr;

constexpr const char* kQueueArea = "shm_queue";

}  // namespace

ShmQueue::ShmQueue(RankOf where, Abandon abandon) : ranks_(where.world), cpus_(usable_cpus()) {
  shared_->where = where;
  shared_->abandon = std::move(abandon);
}

ShmQueue::~ShmQueue() {
  if (workers_.empty()) return;
  if (fork_guard_.in_child()) {  // the threads stayed with the parent, and wait there:
    for (std::thread& worker : workers_) worker.detach();
    new std::shared_ptr<Shared>(std::move(shared_));  // glibc hangs in destroying what it waits on
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->ending = true;
  }
  shared_->changed.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ShmQueue::submit(const c10::intrusive_ptr<ShmWork>& work, bool synchronous, Run run) {
  Shared& shared = *shared_;
  refuse_within(shared, "an operation");
  std::unique_lock<std::mutex> lock(shared.mutex);
  if (synchronous && !shared.busy && shared.tasks.empty()) {
    shared.tasks.push_back({work, std::move(run), {}});
    run_next_and_tell(shared, lock);
    lock.unlock();
    if (!work->isSuccess()) {
      shared.told = shared.untold.load();
      std::rethrow_exception(work->exception());
    }
    return;
  }
  const bool cpus_are_taken = ranks_ * at::get_num_threads() >= cpus_;
  const auto patience = cpus_are_taken && !synchronous ? kPatience : kPatience.zero();
  work->queue_ = shared_;
  const bool from_callback = calls_back_for == &shared;
  shared.tasks.push_back({work, std::move(run), Clock::now() + patience, from_callback});
  shared.from_callbacks += from_callback ? 1 : 0;
  if (workers_.empty()) {
    fork_guard_ = {};
    start_worker();
  }
  lock.unlock();
  shared.changed.notify_all();
}

void ShmQueue::start_worker() {
  workers_.emplace_back([this] { work_off(); });
  ::pthread_setname_np(workers_.back().native_handle(), "trireme-comm");
}

void ShmQueue::cancel(const std::exception_ptr& why) {
  std::deque<Task> cancelled;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    cancelled.swap(shared_->tasks);
    shared_->from_callbacks = 0;
  }
  for (const Task& task : cancelled) task.work->complete(why);
  shared_->changed.notify_all();
  for (const Task& task : cancelled) task.work->run_callbacks(why);  // may wait for each other
}

bool ShmQueue::is_told(uint64_t epoch) const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const bool may_be_untold = shared_->busy || !shared_->tasks.empty() || shared_->untold == epoch;
  return shared_->told == epoch || !may_be_untold;
}

bool ShmQueue::is_idle() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return !shared_->busy && shared_->tasks.empty();
}

void ShmQueue::drain() {
  refuse_within(*shared_, "the end of the group");
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (!shared_->tasks.empty() || shared_->busy || shared_->in_callbacks > 0) {
    if (!shared_->busy && !shared_->tasks.empty() && shared_->in_callbacks == 0) {
      rethrow_interruption(*shared_, run_next_and_tell(*shared_, lock));
      continue;
    }
    shared_->changed.wait_for(lock, shm::kLookEvery);
    lock.unlock();
    try {
      check_interruption();
    } catch (const Interruption& interruption) {
      shared_->told = shared_->abandon(interruption.reason);
      throw;
    }
    lock.lock();
  }
}

// Runs the oldest task. `lock` is held before and after.
ShmQueue::Ended ShmQueue::run_next(Shared& shared, std::unique_lock<std::mutex>& lock) {
  const at::NoGradGuard no_grad;  // copies of tensors that require a gradient are no operations
  Task task = std::move(shared.tasks.front());
  shared.tasks.pop_front();
  shared.from_callbacks -= task.from_callback ? 1 : 0;
  shared.busy = true;
  lock.unlock();
  Ended ended{task.work, {}};
  task.work->started_ = Clock::now();
  const void* outer = std::exchange(operates_for, &shared);
  try {
    task.run();
  } catch (...) {
    ended.error = std::current_exception();
  }
  operates_for = outer;
  // Freeing tensors and callbacks of Python takes its lock, which waiters for ours may hold.
  task = {};
  ended.work->complete(ended.error);
  lock.lock();
  shared.busy = false;
  shared.changed.notify_all();
  return ended;
}

void ShmQueue::tell(Shared& shared, std::unique_lock<std::mutex>& lock, Ended ended) {
  if (!ended.work->has_callbacks()) return;
  if (++shared.in_callbacks == 1) shared.callbacks_began = Clock::now();
  lock.unlock();
  const void* outer = std::exchange(calls_back_for, &shared);
  ended.work->run_callbacks(ended.error);
  calls_back_for = outer;
  ended = {};
  lock.lock();
  if (--shared.in_callbacks == 0) shared.changed.notify_all();
}

std::exception_ptr ShmQueue::run_next_and_tell(Shared& shared, std::unique_lock<std::mutex>& lock) {
  Ended ended = run_next(shared, lock);
  const std::exception_ptr error = ended.error;
  tell(shared, lock, std::move(ended));
  return error;
}

// Ends this thread's wait if it was interrupted, whichever operation it ran.
void ShmQueue::rethrow_interruption(Shared& shared, const std::exception_ptr& error) {
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const Interruption&) {
    shared.told = shared.untold.load();
    throw;
  } catch (...) {  // a thread that waits for that operation gets the error
  }
}

void ShmQueue::run_until_done(Shared& shared, ShmWork& work) {
  std::unique_lock<std::mutex> lock(shared.mutex);
  const auto is_its_turn = [&] {
    return !shared.busy && !shared.tasks.empty() &&
           (shared.in_callbacks == 0 || calls_back_for == &shared);
  };
  while (!work.isCompleted() && is_its_turn())
    rethrow_interruption(shared, run_next_and_tell(shared, lock));
}

// Makes the queue's own thread take all operations up to that one.
void ShmQueue::hurry(Shared& shared, const ShmWork& work) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  const auto is_it = [&](const Task& task) { return task.work.get() == &work; };
  const auto last = std::find_if(shared.tasks.begin(), shared.tasks.end(), is_it);
  if (last == shared.tasks.end()) return;
  for (auto task = shared.tasks.begin(); task <= last; ++task)
    task->worker_takes_it_at = Clock::time_point::min();
  shared.changed.notify_all();
}

// Ends a wait, by an interruption, for an operation that another thread runs: abandons the
// operation as if this thread had run it itself.
void ShmQueue::leave(Shared& shared, ShmWork& work, const std::string& reason) {
  std::unique_lock<std::mutex> lock(shared.mutex);
  if (work.isCompleted()) return;
  if (++shared.in_callbacks == 1) shared.callbacks_began = Clock::now();  // drain() waits for it
  lock.unlock();
  shared.told = shared.abandon(reason);
  lock.lock();
  if (--shared.in_callbacks == 0) shared.changed.notify_all();
}

// Throws if this thread is in the middle of an operation: no thread could run the next one.
void ShmQueue::refuse_within(const Shared& shared, const char* call) {
  if (operates_for != &shared) return;
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kQueueArea,
                 std::string("got ") + call +
                     " of a group from within a signal handler, while this thread "
                     "waits in an operation of that group",
                 shared.where, "Only note the signal there, and act on it between operations."));
}

// Runs the next operation on one of the queue's threads, and starts one more if all are in
// callbacks.
void ShmQueue::run_next_and_stand_in(std::unique_lock<std::mutex>& lock) {
  Shared& shared = *shared_;
  Ended ended = run_next(shared, lock);
  if (++shared.workers_in_callbacks == workers_.size() && ended.work->has_callbacks())
    start_worker();
  tell(shared, lock, std::move(ended));
  --shared.workers_in_callbacks;
}

void ShmQueue::work_off() {
  Shared& shared = *shared_;
  std::unique_lock<std::mutex> lock(shared.mutex);
  for (;;) {
    if (shared.tasks.empty() && shared.ending) return;
    if (shared.busy || shared.tasks.empty()) {
      shared.changed.wait(lock);
      continue;
    }
    const Task& next = shared.tasks.front();
    auto takes_it_at = shared.ending ? Clock::time_point::min() : next.worker_takes_it_at;
    if (shared.in_callbacks > 0 && shared.from_callbacks == 0)
      takes_it_at = std::max(takes_it_at, shared.callbacks_began + kPatience);
    if (Clock::now() >= takes_it_at) {
      run_next_and_stand_in(lock);
    } else {
      shared.changed.wait_until(lock, takes_it_at);
    }
  }
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  const auto queue = queue_.lock();
  if (!queue) return Work::wait(timeout);
  if (!isCompleted()) ShmQueue::refuse_within(*queue, "a wait for an operation");
  if (timeout == kNoTimeout) {
    ShmQueue::run_until_done(*queue, *this);
  } else {
    ShmQueue::hurry(*queue, *this);
  }
  try {
    wait_for_end(*queue, timeout);
    return Work::wait(kNoTimeout);
  } catch (...) {
    if (isCompleted()) queue->told = queue->untold.load();
    throw;
  }
}

void ShmWork::wait_for_end(ShmQueue::Shared& queue, std::chrono::milliseconds timeout) {
  const bool limited = timeout != kNoTimeout;
  const auto deadline = deadline_after(limited ? timeout : kLongestWait);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!completed_) {
    const auto now = ShmQueue::Clock::now();
    if (now >= deadline) {
      C10_THROW_ERROR(DistBackendError, error_text(kQueueArea,
                                                   "operation " + std::to_string(sequence_) +
                                                       " is not done after a wait of " +
                                                       std::to_string(timeout.count()) + " ms",
                                                   queue.where, "Wait longer; it goes on."));
    }
    cv_.wait_until(lock, std::min(deadline, now + shm::kLookEvery), [this] { return completed_; });
    if (completed_) return;
    lock.unlock();
    try {
      check_interruption();
    } catch (const Interruption& interruption) {
      ShmQueue::leave(queue, *this, interruption.reason);
      throw;
    }
    lock.lock();
  }
}

void ShmWork::complete(const std::exception_ptr& error) {
  finished_.store(ShmQueue::Clock::now().time_since_epoch().count(), std::memory_order_release);
  finish(error);
}

void ShmWork::run_callbacks(const std::exception_ptr& error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    future = future_;
  }
  if (const auto queue = queue_.lock(); queue && future && error)
    queue->told = queue->untold.load();
  if (future) complete_future(*future, error, outputs_);
  if (hooks_ && !error) hooks_->completed({key_, opType_, sequence_, started_, *finished_at()});
}

float ShmWork::getDuration() const {
  const auto finished = finished_at();
  TORCH_CHECK(finished,
              "[shm_queue] got a question for the duration of an operation that has not "
              "ended. Wait for it first.");
  return std::chrono::duration<float, std::milli>(*finished - started_).count();
}

std::optional<ShmQueue::Clock::time_point> ShmWork::finished_at() const {
  const auto ticks = finished_.load(std::memory_order_acquire);
  if (ticks == 0) return std::nullopt;
  return ShmQueue::Clock::time_point(ShmQueue::Clock::duration(ticks));
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      future_ = make_work_future();
      if (isCompleted()) complete_future(*future_, exception(), outputs_);
    }
    future = future_;
  }
  if (const auto queue = queue_.lock()) ShmQueue::hurry(*queue, *this);
  return future;
}

}  // namespace trireme
