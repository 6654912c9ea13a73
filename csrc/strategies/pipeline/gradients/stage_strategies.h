#pragma once

#include <trireme/sync/deferred_sync.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// Controls the strategies that average gradients of a stage: DistributedDataParallel, ZeRO 2 and
// fully_shard around its layers or their parameters. They are held back in all backwards of a step
// but the last one.
class StageStrategies {
 public:
  // `given` are those that deferred_sync_of() does not find.
  explicit StageStrategies(std::vector<std::shared_ptr<DeferredSync>> given)
      : given_(std::move(given)) {}

  bool has_given() const { return !given_.empty(); }
  // Finds the strategies, and holds them back. Returns the parameters that they leave to the
  // pipeline.
  std::vector<at::Tensor> begin_step(const std::vector<at::Tensor>& parameters);
  bool exist() const { return !held_.empty(); }
  void before_last_backward();
  void after_last_backward();
  void end_step();
  // Announces the failure to the ranks that strategies average with, and ends the step.
  void abandon(const std::string& why) noexcept;

 private:
  std::vector<std::shared_ptr<DeferredSync>> given_;
  std::vector<std::shared_ptr<DeferredSync>> held_;
};

}  // namespace trireme
