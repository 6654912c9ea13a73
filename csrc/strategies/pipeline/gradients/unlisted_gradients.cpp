#include <trireme/strategies/pipeline/gradients/unlisted_gradients.h>

#include <trireme/module/sends_gradients.h>

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <typeinfo>
#include <unordered_set>

namespace trireme {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

void UnlistedGradients::set_listed(const std::vector<at::Tensor>& parameters) {
  listed_.clear();
  for (const at::Tensor& parameter : parameters)
    listed_.emplace(parameter.unsafeGetTensorImpl(), parameter);
}

bool UnlistedGradients::add(const edge_list& roots, bool takes) {
  bool sends = false;
  std::vector<at::Tensor> leaves;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open;
  const auto visit = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second)
      open.push_back(edge.function.get());
  };
  for (const Edge& root : roots) visit(root);
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (typeid(*node) == typeid(AccumulateGrad)) {
      const at::Tensor& leaf = static_cast<const AccumulateGrad*>(node)->variable;
      if (listed_.count(leaf.unsafeGetTensorImpl()) == 0) leaves.push_back(leaf);
      continue;
    }
    sends = sends || dynamic_cast<const SendsGradients*>(node) != nullptr;
    for (const Edge& edge : node->next_edges()) visit(edge);
  }
  if (takes && !leaves.empty()) {
    const std::lock_guard lock(mutex_);
    gradients_.begin(leaves);
  }
  return sends;
}

void UnlistedGradients::end(int64_t divisor) {
  const std::lock_guard lock(mutex_);
  gradients_.end(divisor);
}

void UnlistedGradients::abandon() {
  const std::lock_guard lock(mutex_);
  gradients_.abandon();
}

}  // namespace trireme
