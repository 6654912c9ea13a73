#include <trireme/strategies/local_sgd/outer_optimizer.h>

#include <ATen/ATen.h>

#include <cstddef>
#include <utility>

namespace trireme {

OuterOptimizer::OuterOptimizer(torch::optim::Optimizer& optimizer,
                               const std::unordered_map<const at::TensorImpl*, at::Tensor>& anchors)
    : optimizer_(optimizer) {
  for (torch::optim::OptimizerParamGroup& group : optimizer_.param_groups()) {
    parameters_.push_back(group.params());
    for (at::Tensor& parameter : group.params()) {
      const auto found = anchors.find(parameter.unsafeGetTensorImpl());
      const bool has_anchor = found != anchors.end() && found->second.defined();
      const at::Tensor target = has_anchor ? found->second : at::empty({0}, parameter.options());
      if (has_anchor) move_state(parameter, target);
      targets_.emplace(parameter.unsafeGetTensorImpl(), target);
      parameter = target;
    }
  }
}

OuterOptimizer::~OuterOptimizer() {
  std::vector<torch::optim::OptimizerParamGroup>& groups = optimizer_.param_groups();
  for (size_t g = 0; g < parameters_.size() && g < groups.size(); ++g) {
    for (size_t i = 0; i < parameters_[g].size(); ++i) {
      move_state(groups[g].params()[i], parameters_[g][i]);
      groups[g].params()[i] = parameters_[g][i];
    }
  }
}

void OuterOptimizer::move_state(const at::Tensor& from, const at::Tensor& to) {
  auto& states = optimizer_.state();
  const auto found = states.find(from.unsafeGetTensorImpl());
  if (found == states.end()) return;
  auto state = std::move(found->second);
  states.erase(found);
  states.insert_or_assign(to.unsafeGetTensorImpl(), std::move(state));
}

void OuterOptimizer::step(const std::vector<at::Tensor>& anchors,
                          const std::vector<at::Tensor>& gradients) {
  for (size_t i = 0; i < anchors.size(); ++i) anchors[i].mutable_grad() = gradients[i];
  optimizer_.step();
  for (const at::Tensor& anchor : anchors) anchor.mutable_grad() = at::Tensor();
}

}  // namespace trireme
