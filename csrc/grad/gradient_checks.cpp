#include <trireme/grad/gradient_checks.h>

#include <ATen/ATen.h>

namespace trireme {

void GradientChecks::check_kind(const at::Tensor& parameter, const std::string& name,
                                bool has_gradient) {
  if (at::GradMode::is_enabled()) {
    refuse(name,
           "in backward(create_graph=True), expected a first-order backward: the average over "
           "ranks has no derivative",
           "Use torch.autograd.grad(..., create_graph=True) inside the loss instead.");
  }
  if (has_gradient && !parameter.grad().defined()) {
    refuse(name,
           "without its gradient, expected it in .grad: a post-accumulate-grad hook took it before "
           "it was averaged",
           "Register the optimizer with _apply_optimizer_in_backward before the first forward, or "
           "step after backward.");
  }
}

void GradientChecks::refuse_late(const std::string& name) {
  refuse(name,
         "with a further gradient in the same backward after its bucket was launched, expected as "
         "many as in the backward before",
         "Checkpoint this layer with use_reentrant=False, or the same number of times in every "
         "step.");
}

void GradientChecks::refuse(const std::string& name, const char* got, const char* next_step) {
  const std::string whose =
      name.empty() ? "a parameter that came after wrapping" : '\'' + name + '\'';
  refused_ = error_text(area_, "got " + whose + ' ' + got, where_, next_step);
  C10_THROW_ERROR(NotImplementedError, refused_);
}

}  // namespace trireme
