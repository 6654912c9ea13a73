#include <trireme/strategies/pipeline/step_gradients.h>

#include <ATen/ATen.h>

#include <unordered_set>
#include <utility>

namespace trireme {

void StepGradients::begin(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    held_.push_back({parameter, std::exchange(parameter.mutable_grad(), at::Tensor())});
  }
}

void StepGradients::end(int64_t divisor) {
  const at::NoGradGuard no_grad;
  for (Held& held : held_) {
    at::Tensor& grad = held.parameter.mutable_grad();
    if (grad.defined() && divisor != 1) grad.div_(divisor);
    if (!held.before.defined()) continue;
    if (!grad.defined()) {
      grad = std::move(held.before);
    } else if (held.before.is_sparse() && !grad.is_sparse()) {
      grad.add_(held.before);
    } else {
      held.before.add_(grad);
      grad = std::move(held.before);
    }
  }
  held_.clear();
}

void StepGradients::abandon() {
  for (Held& held : held_) held.parameter.mutable_grad() = std::move(held.before);
  held_.clear();
}

}  // namespace trireme
