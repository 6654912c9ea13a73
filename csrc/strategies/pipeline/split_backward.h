#pragma once

#include <trireme/common/export.h>
#include <trireme/module/autograd_node.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <vector>

namespace trireme {

// [Note: a backward in two halves]
//
// The stage before waits for the gradients of this stage's inputs, and no stage waits for those of
// its weights. So the first half computes the former, the second half the latter, later (Qi et al.,
// 2023; torch's stage_backward_input and stage_backward_weight).
//
// A node of the graph is on an input path, on a weight path, or on both: where an input is
// multiplied with a weight, say. In the first half autograd runs the nodes on input paths. Where
// one of these has an edge to weights only, the gradients that came to it are kept. In the second
// half a node of ours stands in for each of them: it has only those edges, and calls the node with
// the kept gradients. Autograd then goes on to the weights. So:
//
// * Weights to which no input leads are reached as well: they begin at an output of their own, or
//   behind such a node. A stage whose inputs need no gradient has all of its backward in the second
//   half.
// * Gradients come through the nodes that accumulate them: hooks and reducers see them.
// * A hook on a tensor is called once: what is kept has passed it.
// * Sums keep the order of a backward in one piece, because the nodes in between keep their
//   sequence numbers: autograd always takes the node that was made last.
// * Saved tensors that only input paths need are freed after the first half.
//
// A node is called in both halves where the two kinds of path meet, each time for its part of the
// edges. A checkpoint recomputes in both.

// The backward of one micro-batch in two halves. One thread at a time.
class TRIREME_API SplitBackward {
 public:
  // `gradients` belong to `roots`. `received` is the node behind the inputs (received_node.h); null
  // where none needs a gradient.
  SplitBackward(torch::autograd::edge_list roots, std::vector<at::Tensor> gradients,
                const NodePtr& received);
  ~SplitBackward();
  SplitBackward(const SplitBackward&) = delete;
  SplitBackward& operator=(const SplitBackward&) = delete;

  // Returns the gradients of the inputs, one for each, undefined where none came; none without a
  // node. Called first, once.
  std::vector<at::Tensor> input_half();
  // Adds the gradients of the weights to .grad. Called second, once; the graph is then gone.
  void weight_half();

 private:
  class Walk;
  struct Kept;
  class Keeper;
  class StandIn;

  // Prepares nodes for the first half; returns those that nothing after it needs.
  std::vector<NodePtr> prepare(const Walk& walk);
  std::vector<at::Tensor> run_input_half(const Walk& walk);

  torch::autograd::edge_list roots_;
  std::vector<at::Tensor> gradients_;
  NodePtr received_;
  std::vector<std::shared_ptr<Kept>> kept_;
  torch::autograd::edge_list sinks_;  // where gradients of weights are accumulated
};

}  // namespace trireme
