#include <trireme/common/worker_pool.h>

#include <trireme/common/error.h>
#include <trireme/common/interruption.h>
#include <trireme/common/intra_op_threads.h>

#include <ATen/SavedTensorHooks.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <string>
#include <utility>

namespace trireme {
namespace {

thread_local const void* working_for = nullptr;  // the state of a pool

std::atomic<Carried (*)()> capture_carried{nullptr};

Carried carried_now() {
  const auto capture = capture_carried.load();
  return capture == nullptr ? Carried() : capture();
}

}  // namespace

void carry_to_workers(Carried (*capture)()) noexcept { capture_carried = capture; }

std::vector<c10::Stream> current_streams(const std::vector<c10::Device>& devices) {
  std::vector<c10::Stream> streams;
  for (size_t i = 0; i < devices.size(); ++i) {
    const c10::Device device = devices[i];
    const bool is_known =
        std::find(devices.begin(), devices.begin() + static_cast<std::ptrdiff_t>(i), device) !=
        devices.begin() + static_cast<std::ptrdiff_t>(i);
    // The CPU and meta devices have none.
    if (device.is_cpu() || device.is_meta() || is_known) continue;
    streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  return streams;
}

struct WorkerPool::Task {
  const Job* job;
  at::ThreadLocalState state;
  std::vector<c10::Stream> streams;  // one per device
  Carried carried;

  void run(size_t worker, c10::Device device) const {
    const at::ThreadLocalStateGuard state_guard(state);
    // Drops the caller's hooks, which may count in the order of one thread; `carried` sets others.
    at::SavedTensorDefaultHooks::set_tls_state({});
    const std::shared_ptr<void> kept = carried ? carried() : nullptr;
    const c10::OptionalDeviceGuard device_guard(device);  // the last job may have chosen another
    const c10::MultiStreamGuard stream_guard(streams);
    (*job)(worker);
  }
};

struct WorkerPool::State {
  struct Worker {
    c10::Device device = c10::Device(c10::kCPU);
    int intra_op_threads = 1;
    const Task* task = nullptr;
    std::exception_ptr error = nullptr;
    std::condition_variable wake = {};
  };

  void serve(size_t worker);
  void stop();

  std::vector<Worker> workers;  // never moved
  std::mutex mutex = {};        // guards all below, and tasks and errors
  std::condition_variable done = {};
  size_t open = 0;
  bool stopping = false;
};

void WorkerPool::State::serve(size_t worker) {
  Worker& own = workers[worker];
  set_own_intra_op_threads(own.intra_op_threads);
  working_for = this;
  const c10::OptionalDeviceGuard device_guard(own.device);
  std::unique_lock lock(mutex);
  for (;;) {
    own.wake.wait(lock, [&] { return own.task != nullptr || stopping; });
    if (own.task == nullptr) return;
    const Task& task = *own.task;
    lock.unlock();
    std::exception_ptr error;
    try {
      task.run(worker, own.device);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    own.task = nullptr;
    own.error = std::move(error);
    if (--open == 0) done.notify_one();
  }
}

WorkerPool::WorkerPool(std::vector<c10::Device> devices, std::vector<int> intra_op_threads,
                       PoolWords words)
    : state_(std::make_shared<State>()), words_(words) {
  TORCH_INTERNAL_ASSERT(!devices.empty() && devices.size() == intra_op_threads.size());
  state_->workers = std::vector<State::Worker>(devices.size());
  for (size_t i = 0; i < devices.size(); ++i) {
    state_->workers[i].device = devices[i];
    state_->workers[i].intra_op_threads = intra_op_threads[i];
  }
}

WorkerPool::~WorkerPool() {
  if (fork_guard_.in_child()) {
    // The threads are the parent's, which this process never had.
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  stop();
  for (std::thread& thread : threads_) {
    // A graph may die in the thread of a replica, and the pool with it.
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void WorkerPool::State::stop() {
  const std::lock_guard lock(mutex);
  stopping = true;
  for (Worker& worker : workers) worker.wake.notify_one();
}

void WorkerPool::stop() noexcept { state_->stop(); }

std::function<void()> WorkerPool::stopper() {
  return [state = state_] { state->stop(); };
}

size_t WorkerPool::count() const { return state_->workers.size(); }

std::vector<c10::Device> WorkerPool::devices() const {
  std::vector<c10::Device> devices;
  for (const State::Worker& worker : state_->workers) devices.push_back(worker.device);
  return devices;
}

void WorkerPool::start() {
  for (size_t worker = threads_.size(); worker < count(); ++worker)
    threads_.emplace_back(worker_loop(worker));
}

std::function<void()> WorkerPool::worker_loop(size_t worker) {
  return [state = state_, worker] { state->serve(worker); };
}

const void* WorkerPool::served_here() { return working_for; }

void WorkerPool::expect_call() const {
  const std::string maker = words_.maker;
  TORCH_CHECK_VALUE(
      !fork_guard_.in_child(),
      error_text(words_.area,
                 c10::str("got a call in a forked child, whose parent has the threads of ",
                          words_.threads, ", expected one in the process that made them"),
                 {}, "Build " + maker + " after the fork."));
  TORCH_CHECK_VALUE(working_for != state_.get(),
                    error_text(words_.area,
                               c10::str("got a call from within ", words_.thread,
                                        ", expected one from outside: it would wait for itself"),
                               {}, "Do not call " + maker + " in its own forward or backward."));
}

std::vector<std::exception_ptr> WorkerPool::run(const std::vector<size_t>& workers, const Job& job,
                                                const std::function<void()>& while_waiting) {
  expect_call();
  const std::lock_guard turn(turn_);
  State& state = *state_;
  const Task task{&job, {}, current_streams(devices()), carried_now()};
  std::unique_lock lock(state.mutex);
  TORCH_CHECK_VALUE(!state.stopping,
                    error_text(words_.area,
                               c10::str("got a call after the threads of ", words_.threads,
                                        " were stopped, expected one before"),
                               {}, std::string("Build ") + words_.maker + " again."));
  state.open = workers.size();
  for (const size_t worker : workers) {
    state.workers[worker].task = &task;
    state.workers[worker].wake.notify_one();
  }
  const auto all_returned = [&] { return state.open == 0; };
  if (!while_waiting) state.done.wait(lock, all_returned);
  while (!state.done.wait_for(lock, kLookAround, all_returned)) {
    lock.unlock();
    while_waiting();
    lock.lock();
  }
  std::vector<std::exception_ptr> errors;
  for (const size_t worker : workers)
    errors.push_back(std::exchange(state.workers[worker].error, nullptr));
  return errors;
}

}  // namespace trireme
