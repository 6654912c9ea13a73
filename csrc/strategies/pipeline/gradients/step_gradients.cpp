#include <trireme/strategies/pipeline/gradients/step_gradients.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace trireme {

at::Tensor sum_of(at::Tensor total, const at::Tensor& gradient) {
  if (!gradient.defined()) return total;
  if (!total.defined()) return gradient.clone();
  if (total.is_sparse() && !gradient.is_sparse()) return gradient.clone().add_(total);
  return total.add_(gradient);
}

void StepGradients::begin(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!places_.try_emplace(parameter.unsafeGetTensorImpl(), held_.size()).second) continue;
    held_.push_back({parameter, std::exchange(parameter.mutable_grad(), at::Tensor())});
  }
}

void StepGradients::add_earlier(const std::vector<at::Tensor>& parameters, int64_t divisor) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) {
    const auto place = places_.find(parameter.unsafeGetTensorImpl());
    if (place == places_.end()) continue;
    Held& held = held_[place->second];
    if (std::exchange(held.is_whole, true)) continue;
    at::Tensor& grad = parameter.mutable_grad();
    if (grad.defined() && divisor != 1) grad.div_(divisor);
    grad = sum_of(grad, held.before);
  }
}

void StepGradients::set_whole(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    const auto place = places_.find(parameter.unsafeGetTensorImpl());
    if (place != places_.end()) held_[place->second].is_whole = true;
  }
}

void StepGradients::end(int64_t divisor) {
  const at::NoGradGuard no_grad;
  for (Held& held : held_) {
    at::Tensor& grad = held.parameter.mutable_grad();
    if (held.is_whole) {
      const bool stays =
          held.before.defined() && grad.defined() && !grad.is_sparse() && !held.before.is_sparse();
      if (stays) grad = held.before.copy_(grad);
      continue;
    }
    if (grad.defined() && divisor != 1) grad.div_(divisor);
    if (!held.before.defined()) continue;
    if (grad.defined() && held.before.is_sparse() && !grad.is_sparse()) {
      grad.add_(held.before);
    } else {
      grad = sum_of(std::move(held.before), grad);
    }
  }
  held_.clear();
  places_.clear();
}

void StepGradients::abandon() {
  for (Held& held : held_) held.parameter.mutable_grad() = std::move(held.before);
  held_.clear();
  places_.clear();
}

}  // namespace trireme
