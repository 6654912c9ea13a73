#pragma once

#include <trireme/common/export.h>
#include <trireme/grad/grad_hook.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace trireme {

// Sums up the gradients that the replicas of a module get at the same time, while their backwards
// run.
//
//   replica 0   dW3   dW2       dW1
//   replica 1      dW3     dW2     dW1
//   sums           |3      |2      |1    each in the thread that brings the last part, still warm
//
// They are always added in the order of the replicas, whichever comes last: the same bits in every
// run. A sum of parts on several devices is made on one of these, another one for the next
// parameter, and goes to its master from there.
class TRIREME_API GradSum {
 public:
  // Takes every gradient that is accumulated in `leaves` ([replica][parameter]) out of .grad again.
  // Hooks that autograd has lost, because a leaf has changed its dtype, are renewed by begin().
  explicit GradSum(const std::vector<std::vector<at::Tensor>>& leaves);
  ~GradSum();
  GradSum(const GradSum&) = delete;
  GradSum& operator=(const GradSum&) = delete;

  // Called before the backwards of `replicas`, whose sums are wanted where `masters` are.
  void begin(const std::vector<size_t>& replicas, const std::vector<at::Tensor>& masters);
  // Makes the next gradient of replicas throw Cancelled: another replica has failed. Any thread may
  // call it.
  void cancel() noexcept { cancelled_.store(true, std::memory_order_relaxed); }
  struct Cancelled final : std::exception {
    const char* what() const noexcept override { return "another replica has failed"; }
  };
  // Called when the backwards have returned: returns the sum for each parameter, undefined where no
  // gradient came.
  std::vector<at::Tensor> finish();
  // Drops the gradients that came. Called instead of finish(), after a failure.
  void drop();

 private:
  class Replica;
  struct Part {
    at::Tensor first = {};
    at::Tensor later = {};  // sum of further times in one backward: reentrant checkpoints
    bool came = false;
  };
  void came(size_t replica, size_t parameter);
  void sum_up(size_t parameter);
  at::Tensor at_home(const at::Tensor& sum, size_t parameter) const;

  const std::vector<std::vector<at::Tensor>>& leaves_;
  std::vector<std::unique_ptr<Replica>> replicas_;
  std::vector<size_t> active_;
  std::vector<c10::Device> homes_;
  std::vector<std::vector<Part>> parts_;  // [replica][parameter]; each written by its replica
  std::vector<std::atomic<int64_t>> arrived_;
  std::vector<at::Tensor> sums_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace trireme
