#pragma once

#include <trireme/common/export.h>
#include <trireme/module/replica_random.h>
#include <trireme/strategies/data_parallel/chunk_plan.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

class Replicas;

// [Note: two graphs]
//
// A forward of replicas records one graph per replica, from its leaves and its part of the input to
// its outputs, and nothing else. The caller sees the gathered outputs, whose history is a single
// node:
//
//   inputs, parameters  <-  ReplicaNode  <-  gathered outputs  <-  loss       the caller's graph
//                             |    ^
//       parts of the gradient v    | sums of gradients
//        replica 0:  outputs -> ... -> leaves                     one engine run per replica,
//        replica 1:  outputs -> ... -> leaves                     each in the thread of its replica
//
// On devices whose graphs the engine runs in a thread per device it is one run for all replicas,
// within the node's: that thread may be the one that waits here.
//
// So the parallel backward is an ordinary step of the caller's engine, without the GIL: hooks of
// parameters, autograd.grad, backward(inputs=), accumulation into .grad and what other strategies
// hang on it see one module. A second derivative has no such graph and raises.

// One forward of the replicas of a module, and the state for its backward. Not thread-safe.
class TRIREME_API ReplicaPass : public std::enable_shared_from_this<ReplicaPass> {
 public:
  ReplicaPass(std::shared_ptr<Replicas> replicas, std::vector<Chunk> chunks);

  // Return the replicas that take part, the former with their numbers of rows.
  const std::vector<Chunk>& chunks() const { return chunks_; }
  std::vector<size_t> replicas() const;

  // Returns the part of `input` of each chunk, on the device of its replica: rows along `dim`
  // (negative ones count from the end) in the order of chunks. A 0-dim tensor goes to all. On the
  // device of the input parts are views of it. Throws ValueError for a `dim` out of range and for
  // too few rows.
  std::vector<at::Tensor> scatter(const at::Tensor& input, int64_t dim);

  struct GatherOptions {
    int64_t dim = 0;
    // One factor per chunk for 0-dim outputs: they become their weighted sum, and otherwise a
    // vector.
    std::vector<double> weights = {};
  };
  // Gathers outputs[position][i], as many for each chunk: output i of all chunks one after another
  // along `dim`, in new memory on the output device. Where gradients are recorded the result
  // belongs to the caller's graph; see [Note: two graphs]. Once per pass.
  //
  // Throws ValueError for shapes and TypeError for dtypes that do not fit together, naming
  // replicas.
  std::vector<at::Tensor> gather(std::vector<std::vector<at::Tensor>> outputs,
                                 const GatherOptions& options);

 private:
  friend class Replicas;
  friend class ReplicaNode;

  enum class Joined : uint8_t { kAbsent, kAlongDim, kStacked, kWeighted };
  struct Output {
    Joined joined = Joined::kAbsent;
    int64_t dim = 0;
    std::vector<int64_t> rows = {};  // per chunk
    bool differentiable = false;
  };
  struct Input {
    int64_t dim = 0;
    bool repeated = false;
    c10::Device device = c10::Device(c10::kCPU);
    std::vector<at::Tensor> leaves = {};  // per chunk
  };

  Output plan_output(const std::vector<std::vector<at::Tensor>>& outputs, size_t i,
                     const GatherOptions& options) const;
  at::Tensor join(const Output& plan, const std::vector<at::Tensor>& parts) const;
  at::Tensor part_of(const at::Tensor& gradient, const Output& plan, size_t position) const;
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients, bool keep_graph);
  void run_backward(const std::vector<at::Tensor>& gradients, const std::vector<size_t>& positions,
                    bool keep_graph);
  at::Tensor input_gradient(const Input& input) const;
  void pass_on_writes();
  void release();

  std::shared_ptr<Replicas> replicas_;
  std::vector<Chunk> chunks_;
  std::vector<double> weights_;
  bool records_;  // gradients, when the forward began
  std::vector<std::pair<at::Tensor, std::vector<at::Tensor>>> scattered_;  // inputs and parts
  std::vector<Input> inputs_;                     // those that require a gradient
  torch::autograd::edge_list next_edges_;         // edges of inputs_, then of the parameters
  std::vector<std::vector<at::Tensor>> outputs_;  // [position][output]
  std::vector<Output> plans_;
  PassRandom random_;
  std::vector<double> forward_ms_;  // per chunk
  std::vector<double> backward_ms_;
  bool released_ = false;
};

}  // namespace trireme
