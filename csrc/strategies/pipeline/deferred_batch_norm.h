#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>
#include <torch/nn/options/batchnorm.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// [Note: how statistics of a whole batch are found]
//
// A child of a C++ module cannot be replaced: its owner holds it by its type. So BatchNorm layers
// run as they are, and update their running statistics in every forward. While a stage computes, an
// observer of torch::batch_norm() sees the input of each such layer, before that updates anything.
// The statistics before the first of these inputs are set aside: replicas of a pipeline begin a
// step with those of the first one. The step ends by restoring them, updated once.

// Lets running statistics of torch::nn::BatchNorm1d, 2d and 3d be those of whole batches: mean and
// variance of all values that the micro-batches of a step have, as of one forward over them.
// Micro-batches are normalized by their own, as ever. A forward that is computed again in a
// backward counts once. Layers in evaluation, and those without running statistics, are left alone.
//
// Cost: copies of the running statistics of each layer and step; per forward of a layer one more
// pass over its input; while a stage with such layers computes, 1 us or so per operator. One thread
// at a time.
class TRIREME_API DeferredBatchNorms {
 public:
  // Finds the layers in `module`, which others may hold, too; `name` tells it in errors. Throws
  // ValueError for a batch norm of another class, SyncBatchNorm among them.
  void add(const std::shared_ptr<torch::nn::Module>& module, const std::string& name);

  // Calls `run`, which trains or evaluates, as one batch. Where it throws, running statistics are
  // what they were before.
  template <typename Run>
  auto whole_batch(const Run& run) {
    Batch batch(*this);
    auto result = run();
    if (failure_) std::rethrow_exception(failure_);
    batch.is_whole = true;
    return result;
  }

  // Observes the inputs of layers on this thread while it lives. Belongs into whole_batch().
  class TRIREME_API Observer {
   public:
    explicit Observer(DeferredBatchNorms& norms);
    ~Observer();
    Observer(const Observer&) = delete;
    Observer& operator=(const Observer&) = delete;

   private:
    DeferredBatchNorms* before_;
    at::RecordFunctionGuard guard_;  // a program may have switched observers off
    at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
  };

 private:
  struct Norm {
    std::shared_ptr<torch::nn::Module> owner;
    const torch::nn::BatchNormOptions* options;
    at::Tensor* running_mean;
    at::Tensor* running_var;
    at::Tensor* num_batches_tracked;
    // The state of the batch that runs.
    at::Tensor mean_before = {};
    at::Tensor var_before = {};
    at::Tensor tracked_before = {};
    bool is_tracked = false;
    int64_t count = 0;  // values per channel, seen so far
    at::Tensor mean = {};
    at::Tensor squares = {};  // sums of squared differences from the mean

    void begin();
    void set_aside();
    // Called before the layer updates its running statistics.
    void gather(const at::Tensor& input);
    // Restores the old statistics, updated with the observed ones if the batch is whole.
    void end(bool is_whole);
    double next_momentum() const;
  };
  struct Batch {
    explicit Batch(DeferredBatchNorms& norms);
    ~Batch();
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    DeferredBatchNorms& norms_;
    bool is_whole = false;
  };

  template <typename Impl>
  bool add_if(const std::shared_ptr<torch::nn::Module>& module);
  static std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& function);

  std::vector<Norm> norms_;
  std::exception_ptr failure_;  // exception of the observer, as it must not throw
};

}  // namespace trireme
