#pragma once

#include <trireme/shm/collectives.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace trireme {

// One operation of the backend, before, while and after it runs.
class ShmWork final : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
          uint64_t sequence)
      : Work(rank, type, title), outputs_(std::move(outputs)), sequence_(sequence) {}

  void complete(std::exception_ptr error);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void settle(c10::ivalue::Future& future, const std::exception_ptr& error);

  std::vector<at::Tensor> outputs_;
  uint64_t sequence_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Operations of one group, run one after the other in the order in which they were submitted: on
// the caller's thread where it waits for the result anyway and nothing is ahead of it (a hand-over
// costs more than a small collective), else on a thread of the queue's own.
class ShmQueue {
 public:
  using Run = std::function<void()>;

  ShmQueue() = default;
  ~ShmQueue();  // after what is queued
  ShmQueue(const ShmQueue&) = delete;
  ShmQueue& operator=(const ShmQueue&) = delete;

  // `run` throws what went wrong; synchronously that is thrown here, else it is in the Work.
  void submit(const c10::intrusive_ptr<ShmWork>& work, bool synchronous, Run run);
  // Returns when nothing is queued or running.
  void drain();

 private:
  struct Task {
    c10::intrusive_ptr<ShmWork> work;
    Run run;
  };
  void work_off();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  bool ending_ = false;
  std::thread worker_;
  uint64_t forks_ = 0;  // of this process, when the worker started
};

}  // namespace trireme
