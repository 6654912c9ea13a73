#pragma once

#include <trireme/common/export.h>
#include <trireme/module/autograd_node.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// The node at which the graph of a stage begins: it keeps the gradients of what the stage has
// received. The tensors in front of it are no leaves, so that a first layer may work in place on
// them.
class TRIREME_API ReceivedNode final : public torch::autograd::Node {
 public:
  // Puts a node behind those of `tensors` whose `needs_gradient` is set. None of them has a graph
  // or requires a gradient yet. Returns null if none needs one.
  static NodePtr put_behind(const std::vector<at::Tensor>& tensors,
                            const std::vector<bool>& needs_gradient);

  std::string name() const override { return "TriremeReceived"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

  // Returns the gradients that have come, one for each tensor that put_behind() was given;
  // undefined where none came.
  std::vector<at::Tensor> take_gradients();
  // Returns where the gradient of a tensor comes in, among the inputs of this node; -1 for one that
  // needs none.
  int64_t place_of(size_t tensor) const { return place_[tensor]; }
  size_t tensors() const { return place_.size(); }

 private:
  std::vector<int64_t> place_;  // among the inputs of this node, by tensor; -1: needs no gradient
  std::vector<at::Tensor> gradients_;
};

}  // namespace trireme
