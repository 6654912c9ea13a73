#pragma once

// Gradient path 1/5. In: autograd  Out: bucket.h (through grad_reducer.h)

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace trireme {

// The receiver of gradients. gradient_ready() is called when the gradient of parameter `index` has
// just been accumulated into .grad (or, with has_gradient false, when a node returned none for it),
// on the autograd thread of the parameter's device, without the GIL; exceptions come out of
// backward().
class GradSink {
 public:
  virtual ~GradSink() = default;
  virtual void gradient_ready(int64_t index, bool has_gradient) = 0;

  // Called before the parameter's gradient is accumulated, by hooks that were made with
  // `also_before`.
  virtual void gradient_due(int64_t /*index*/) {}
};

// One parameter's link to the gradient path: a post hook on its AccumulateGrad node. That place is
// free for any number of hooks, unlike the tensor's single post-accumulate slot, which is Python's.
//
// The node is kept alive (autograd itself only holds it weakly) and the hook is taken off again on
// destruction. `sink` must outlive the hook. Move-only.
class TRIREME_API GradHook {
 public:
  GradHook() = default;  // no parameter
  // With `also_before` the sink is called before a gradient is accumulated, too.
  GradHook(const at::Tensor& parameter, int64_t index, GradSink& sink, bool also_before = false);
  ~GradHook() { detach(); }
  GradHook(GradHook&& other) noexcept { swap(other); }
  GradHook& operator=(GradHook&& other) noexcept {
    swap(other);
    return *this;
  }

  // Returns whether gradients of `parameter` still arrive here. A change of dtype or device makes
  // autograd build another node, and the hook on the old one silently stops.
  bool is_attached_to(const at::Tensor& parameter) const;

  // Returns whether the backward running on this thread will accumulate into this parameter, when
  // it is a backward(inputs=...) or autograd.grad() that visits a part of the graph only.
  bool is_visited_by(const std::unordered_map<torch::autograd::Node*,
                                              torch::autograd::GraphTask::ExecInfo>& visited) const;

 private:
  // shared_ptr up to torch 2.12, intrusive_ptr since.
  using NodePtr = std::decay_t<decltype(torch::autograd::impl::grad_accumulator(
      std::declval<const at::Tensor&>()))>;

  void detach() noexcept;
  void swap(GradHook& other) noexcept {
    std::swap(node_, other.node_);
    std::swap(key_, other.key_);
    std::swap(before_, other.before_);
  }

  NodePtr node_;
  uintptr_t key_ = 0;
  const torch::autograd::FunctionPreHook* before_ = nullptr;  // the node's
};

}  // namespace trireme
