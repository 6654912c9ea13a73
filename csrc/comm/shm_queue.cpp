#include <trireme/comm/shm_queue.h>

#include <trireme/common/cpus.h>
#include <trireme/common/forks.h>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>

#include <pthread.h>

namespace trireme {
namespace {

// How long the queue's thread leaves an operation to whoever waits for it, where no CPU is free.
// Most backwards end sooner; one that does not gets its first buckets reduced underway.
constexpr std::chrono::milliseconds kPatience{50};

}  // namespace

ShmQueue::ShmQueue(int64_t ranks) : ranks_(ranks), cpus_(usable_cpus()) {}

ShmQueue::~ShmQueue() {
  if (!worker_.joinable()) return;
  if (forks_ != forks_so_far()) {  // the thread stayed with the parent, and waits there:
    worker_.detach();
    new std::shared_ptr<Shared>(std::move(shared_));  // glibc hangs in destroying what it waits on
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->ending = true;
  }
  shared_->changed.notify_all();
  worker_.join();
}

void ShmQueue::submit(const c10::intrusive_ptr<ShmWork>& work, bool synchronous, Run run) {
  Shared& shared = *shared_;
  std::unique_lock<std::mutex> lock(shared.mutex);
  if (synchronous && !shared.busy && shared.tasks.empty()) {
    shared.tasks.push_back({work, std::move(run), {}});
    run_next(shared, lock);
    lock.unlock();
    if (!work->isSuccess()) std::rethrow_exception(work->exception());
    return;
  }
  const bool cpus_are_taken = ranks_ * at::get_num_threads() >= cpus_;
  const auto patience = cpus_are_taken && !synchronous ? kPatience : kPatience.zero();
  work->queue_ = shared_;
  shared.tasks.push_back({work, std::move(run), Clock::now() + patience});
  if (!worker_.joinable()) {
    forks_ = forks_so_far();
    worker_ = std::thread([this] { work_off(); });
    ::pthread_setname_np(worker_.native_handle(), "trireme-comm");
  }
  lock.unlock();
  shared.changed.notify_all();
}

void ShmQueue::drain() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (!shared_->tasks.empty() || shared_->busy) {
    if (shared_->busy) {
      shared_->changed.wait(lock);
    } else {
      run_next(*shared_, lock);
    }
  }
}

// Runs the oldest task. `lock` is held before and after.
void ShmQueue::run_next(Shared& shared, std::unique_lock<std::mutex>& lock) {
  const at::NoGradGuard no_grad;  // copies of tensors that require a gradient are no operations
  Task task = std::move(shared.tasks.front());
  shared.tasks.pop_front();
  shared.busy = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    task.run();
  } catch (...) {
    error = std::current_exception();
  }
  task.work->complete(error);
  // To free tensors and callbacks of Python takes its lock, which whoever waits for ours may hold.
  task = {};
  lock.lock();
  shared.busy = false;
  shared.changed.notify_all();
}

void ShmQueue::run_until_done(Shared& shared, ShmWork& work) {
  std::unique_lock<std::mutex> lock(shared.mutex);
  while (!work.isCompleted() && !shared.busy && !shared.tasks.empty()) run_next(shared, lock);
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
    const bool hurry = shared.ending || next.work->wanted_by_future_.load();
    const auto takes_it_at = next.worker_takes_it_at;
    if (hurry || Clock::now() >= takes_it_at) {
      run_next(shared, lock);
    } else {
      shared.changed.wait_until(lock, takes_it_at);
    }
  }
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (const auto queue = queue_.lock()) ShmQueue::run_until_done(*queue, *this);
  return Work::wait(timeout);
}

void ShmWork::complete(std::exception_ptr error) {
  finished_.store(ShmQueue::Clock::now().time_since_epoch().count(), std::memory_order_release);
  finish(error);
  const std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) settle(*future_, error);
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
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (isCompleted()) settle(*future_, exception());
    }
    future = future_;
  }
  wanted_by_future_.store(true);
  if (const auto queue = queue_.lock()) {
    const std::lock_guard<std::mutex> lock(queue->mutex);
    queue->changed.notify_all();
  }
  return future;
}

void ShmWork::settle(c10::ivalue::Future& future, const std::exception_ptr& error) {
  if (future.completed()) return;
  error ? future.setError(error) : future.markCompleted(at::IValue(outputs_));
}

}  // namespace trireme
