#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace trireme {

// [Note: gradients with a graph]
//
// backward(create_graph=True) leaves gradients in .grad that have functions of their own. Their
// values travel; their graph cannot, since it is in this process. So the average gets a graph of
// one node, which multiplies by 1 / divisor and goes on into this rank's gradients: d(.grad) is
// this rank's part of the derivative, as under torch's DistributedDataParallel. Its sum over the
// ranks is the derivative of the average. A gradient that is averaged twice is multiplied twice.
//
// A delivery takes the graph off each gradient that comes, so that its memory can be freed as ever,
// and gives it to the average. A strategy that keeps only a part of each average drops it. A
// backward that makes no graph leaves the average's graph as it is, also if the next average is
// another tensor (a bucket whose memory a hook still holds is not written again).
//
// Two rules follow. If there is a graph, autograd adds out of place: .grad is then another tensor,
// and the old one is the caller's (FlatBucket::begin_step). And a backward that reaches an average
// synchronizes, as if it had reached the forward that the average comes from.

// Returns whether a gradient has a function.
TRIREME_API bool has_graph(const at::Tensor& grad);
// Removes the graph of a gradient, in place.
TRIREME_API void drop_graph(const at::Tensor& grad);
// Returns the gradient if it is an average with a graph, else an undefined tensor.
TRIREME_API at::Tensor average_with_graph(const at::Tensor& grad);
// Gives `to` the graph of `from`, unless they are one tensor.
TRIREME_API void copy_graph(const at::Tensor& from, const at::Tensor& to);

// The graphs of the gradients of a step, by parameter. Not thread-safe; its reducer serialises
// access.
class TRIREME_API GradientGraphs {
 public:
  // `reached` is called when a backward has come to an average, on autograd's thread.
  explicit GradientGraphs(std::function<void()> reached) : reached_(std::move(reached)) {}

  // Begins a step. Keeps graphs taken before, since a step may begin again with other buckets.
  void begin(size_t parameters) { taken_.resize(parameters); }
  // Takes the graph off a gradient, if it has one; a further one if more was accumulated.
  void take(size_t parameter, const at::Tensor& grad);
  // Gives `grad` the graphs that were taken, times `factor`.
  void give_back(size_t parameter, const at::Tensor& grad, double factor);

 private:
  std::function<void()> reached_;
  std::vector<torch::autograd::edge_list> taken_;
};

}  // namespace trireme
