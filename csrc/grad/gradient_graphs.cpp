#include <trireme/grad/gradient_graphs.h>

#include <trireme/module/autograd_node.h>
#include <trireme/module/output_hook.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

// See [Note: gradients with a graph] in gradient_graphs.h.

namespace trireme {
namespace {

using torch::autograd::variable_list;

// Passes a gradient on to all of this rank's gradients that are in an average.
class AverageNode final : public torch::autograd::Node {
 public:
  explicit AverageNode(double factor) : factor_(factor) {}

  variable_list apply(variable_list&& gradients) override {
    const at::Tensor& gradient = gradients.front();
    return variable_list(num_outputs(), gradient.defined() ? gradient.mul(factor_) : at::Tensor());
  }
  std::string name() const override { return "TriremeAverage"; }

 private:
  double factor_;
};

}  // namespace

bool has_graph(const at::Tensor& grad) { return grad.defined() && !grad.is_leaf(); }

void drop_graph(const at::Tensor& grad) {
  if (has_graph(grad)) torch::autograd::impl::set_gradient_edge(grad, {});
}

at::Tensor average_with_graph(const at::Tensor& grad) {
  if (!has_graph(grad)) return {};
  const auto& function = grad.grad_fn();
  return dynamic_cast<const AverageNode*>(function.get()) != nullptr ? grad : at::Tensor();
}

void copy_graph(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_same(to) || !to.defined()) return;
  torch::autograd::impl::set_gradient_edge(to, torch::autograd::impl::gradient_edge(from));
}

void GradientGraphs::take(size_t parameter, const at::Tensor& grad) {
  if (!has_graph(grad)) return;
  taken_[parameter].push_back(torch::autograd::impl::gradient_edge(grad));
  drop_graph(grad);
}

void GradientGraphs::give_back(size_t parameter, const at::Tensor& grad, double factor) {
  torch::autograd::edge_list edges = std::exchange(taken_[parameter], {});
  if (edges.empty() || !grad.defined()) return;
  const auto node = make_node<AverageNode>(factor);
  node->set_next_edges(std::move(edges));
  torch::autograd::impl::set_gradient_edge(grad, {node, node->add_input_metadata(grad)});
  on_gradient(grad, reached_);
}

}  // namespace trireme
