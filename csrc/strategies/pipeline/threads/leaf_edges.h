#pragma once

#include <trireme/common/export.h>
#include <trireme/module/autograd_node.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_map>

namespace trireme {

// [Note: stand-ins of parameters]
//
// Stages on several threads may share a parameter, and a backward inside of another one is to hand
// gradients over instead of adding them to .grad. In both cases gradients must not come to the
// parameter itself. Its module runs as it is, and no hook of the parameter is to run twice. So the
// graph of a micro-batch is recorded with the parameter, and then led to a stand-in: a leaf with
// the same memory, whose .grad only the pipeline sees.

// Redirects graphs to other leaves than those with which they were recorded.
class TRIREME_API LeafEdges {
 public:
  // Lets gradients of `leaf` come to `stand_in`.
  void add(const at::Tensor& leaf, const at::Tensor& stand_in);
  bool empty() const { return stand_ins_.empty(); }

  // Redirects `roots`, and the edges behind them. No other thread may walk the graph meanwhile.
  void redirect(torch::autograd::edge_list& roots) const;

 private:
  struct StandIn {
    torch::autograd::Edge leaf;  // keeps the node alive, by which it is found
    torch::autograd::Edge edge;
  };
  const torch::autograd::Edge* find(const torch::autograd::Edge& edge) const;

  std::unordered_map<const torch::autograd::Node*, StandIn> stand_ins_;
};

}  // namespace trireme
