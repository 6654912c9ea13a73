#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/gradients/step_gradients.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace trireme {

// [Note: leaves that nobody lists]
//
// A step divides what it added to .grad of the parameters that layers have. Layers may use others:
// a weight in a closure, what a loss holds on to, an input of the step that requires a gradient.
// Their gradients have come `micro_batches` times as well, so they are found in the graphs of
// forwards, before any backward, and divided with the others. A walk over a graph costs some 0.1 us
// per node, once per stage and micro-batch.

// The gradients of a step that come to leaves which are no parameters of any stage. Thread-safe.
class TRIREME_API UnlistedGradients {
 public:
  // Sets which leaves are parameters of stages. Not while a step runs.
  void set_listed(const std::vector<at::Tensor>& parameters);
  // Looks for leaves behind `roots`; if it `takes` them, what .grad holds is set aside until the
  // step ends. Returns whether there is a node that sends gradients elsewhere
  // (module/sends_gradients.h).
  bool add(const torch::autograd::edge_list& roots, bool takes);
  // Divides what the step made, and adds it to what was there.
  void end(int64_t divisor);
  // Drops what the step made.
  void abandon();

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> listed_;
  StepGradients gradients_;
};

}  // namespace trireme
