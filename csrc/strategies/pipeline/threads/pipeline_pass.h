#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/batch_versions.h>
#include <trireme/strategies/pipeline/runner.h>
#include <trireme/strategies/pipeline/threads/pipeline_threads.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace trireme {

// [Note: the two graphs of a pass]
//
// The forwards of a pass record a graph for each stage and micro-batch, in the thread of that
// stage. The caller sees outputs, and parts of the loss that layers added, whose history is a
// single node:
//
//   inputs, parameters  <-  node  <-  outputs of micro-batches  <-  loss       the caller's graph
//                            |  ^
//       gradients of outputs v  | gradients of inputs and parameters
//             the other actions of all threads
//
// On devices torch's engine runs a node in the thread of its gradients' device. There the node may
// not wait for the threads, whose backwards need that thread. So another node stands in front,
// which hands over the gradients and returns one zero on the CPU: the node behind it is run by the
// thread that called backward().
//
// So the backward of a pipeline is an ordinary step of the caller's engine: hooks of parameters,
// autograd.grad, accumulation into .grad, and what strategies around the pipeline hang on it, see
// one module, whose gradients are there once per backward. A second derivative has no such graph.

// One forward of a pipeline in one process, and the state for its backward. One thread at a time.
class TRIREME_API PipelinePass : public std::enable_shared_from_this<PipelinePass> {
 public:
  // `versions` are those of its inputs.
  PipelinePass(std::shared_ptr<PipelineThreads> threads, std::shared_ptr<BatchVersions> versions);

  // Returns the tensor that stages get for an input of a micro-batch that requires a gradient;
  // other inputs come back as they are. A first layer may work in place on it.
  at::Tensor enter(const at::Tensor& input, int64_t micro_batch);

  // Runs the forwards, once. Returns what the last stage returned, one per micro-batch, in the
  // caller's graph where gradients are recorded. Parts of the loss that layers had go to the
  // LossScope of this thread, in that graph, too. `around_backward` is called before (true) and
  // after (false) each backward, on the thread of that. If it throws before, there is no backward;
  // after it, it may not throw.
  std::vector<PipelineValue> forward(std::vector<PipelineValue> inputs,
                                     std::function<void(bool begins)> around_backward = {});

 private:
  friend class PassNode;
  friend class HandOverNode;

  std::vector<at::Tensor> backward(std::vector<at::Tensor> gradients, bool keep_graph);
  void run_backward(const PassBackward& backward);
  void release();
  void wait_for_gradients();

  std::shared_ptr<PipelineThreads> threads_;
  std::shared_ptr<BatchVersions> versions_;
  bool records_;  // gradients were recorded when it was made
  std::function<void(bool)> around_backward_;
  std::vector<std::pair<at::Tensor, at::Tensor>> inputs_;  // with the leaf of each
  PipelineThreads::PassState state_;
  std::vector<std::vector<int64_t>>
      places_;  // the place of an output of a micro-batch among the node's inputs
  // The places of parts of the loss, by stage and micro-batch.
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> loss_places_;
  std::vector<at::Tensor> handed_over_;  // gradients, on devices
  bool is_released_ = false;
};

}  // namespace trireme
