#include <trireme/comm/shm_queue.h>

#include <trireme/common/forks.h>

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>

#include <pthread.h>

namespace trireme {

void ShmWork::complete(std::exception_ptr error) {
  finish(error);
  const std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) settle(*future_, error);
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  const std::lock_guard<std::mutex> lock(future_mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (isCompleted()) settle(*future_, exception());
  }
  return future_;
}

void ShmWork::settle(c10::ivalue::Future& future, const std::exception_ptr& error) {
  if (future.completed()) return;
  error ? future.setError(error) : future.markCompleted(at::IValue(outputs_));
}

ShmQueue::~ShmQueue() {
  if (!worker_.joinable()) return;
  if (forks_ != forks_so_far()) {  // the thread stayed with the parent
    worker_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

void ShmQueue::submit(const c10::intrusive_ptr<ShmWork>& work, bool synchronous, Run run) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (synchronous && !busy_ && tasks_.empty()) {
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      run();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    busy_ = false;
    lock.unlock();
    changed_.notify_all();
    work->complete(error);
    if (error) std::rethrow_exception(error);
    return;
  }
  tasks_.push_back({work, std::move(run)});
  if (!worker_.joinable()) {
    forks_ = forks_so_far();
    worker_ = std::thread([this] { work_off(); });
    ::pthread_setname_np(worker_.native_handle(), "trireme-comm");
  }
  lock.unlock();
  changed_.notify_all();
}

void ShmQueue::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
}

void ShmQueue::work_off() {
  const at::NoGradGuard no_grad;  // copies of tensors that require a gradient are no operations
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !busy_ && (ending_ || !tasks_.empty()); });
    if (tasks_.empty()) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      task.run();
    } catch (...) {
      error = std::current_exception();
    }
    task.work->complete(error);
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace trireme
