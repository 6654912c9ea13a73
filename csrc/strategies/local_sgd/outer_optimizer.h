#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace trireme {

// Makes a torch::optim optimizer over parameters step their anchors in their place, with its state,
// as long as this lives. A parameter without an anchor is not stepped meanwhile.
class OuterOptimizer {
 public:
  // `anchors` by parameter. The optimizer must outlive this.
  OuterOptimizer(torch::optim::Optimizer& optimizer,
                 const std::unordered_map<const at::TensorImpl*, at::Tensor>& anchors);
  ~OuterOptimizer();
  OuterOptimizer(const OuterOptimizer&) = delete;
  OuterOptimizer& operator=(const OuterOptimizer&) = delete;

  // Makes a step of these anchors, by these gradients.
  void step(const std::vector<at::Tensor>& anchors, const std::vector<at::Tensor>& gradients);

  torch::optim::Optimizer& optimizer() const { return optimizer_; }
  // Returns what it steps in place of each parameter; without elements where there is no anchor.
  const std::unordered_map<const at::TensorImpl*, at::Tensor>& targets() const { return targets_; }

 private:
  void move_state(const at::Tensor& from, const at::Tensor& to);

  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> parameters_;  // by group, as they were
  std::unordered_map<const at::TensorImpl*, at::Tensor> targets_;
};

}  // namespace trireme
