#include <trireme/grad/gradient_checks.h>

#include <trireme/grad/gradient_graphs.h>

#include <c10/util/Exception.h>

namespace trireme {

void GradientChecks::check(const at::Tensor& parameter, const std::string& name,
                           bool keeps_graphs) {
  if (!parameter.grad().defined()) {
    refuse(name,
           "without its gradient, expected it in .grad: a post-accumulate-grad hook took it before "
           "it was averaged",
           "Register the optimizer with _apply_optimizer_in_backward before the first forward, or "
           "step after backward.");
  }
  if (where_.rank == 0 && has_graph(parameter.grad())) say_of_graph(keeps_graphs);
}

void GradientChecks::say_of_graph(bool is_kept) const {
  if (!is_kept) {
    TORCH_WARN_ONCE(error_text(
        area_,
        "got a gradient with a graph (create_graph=True): .grad is the average over the ranks and "
        "has no graph, because each rank keeps a part of it only",
        where_, "Use autograd.grad with create_graph=True inside the loss, DDP, or ZeRO stage 1."));
  } else if (where_.world > 1) {
    TORCH_WARN_ONCE(error_text(
        area_,
        "got a gradient with a graph (create_graph=True): .grad is the average over the ranks, but "
        "its graph is that of this rank alone, times 1 / " +
            std::to_string(where_.world),
        where_, "Sum up over the ranks what you derive from .grad."));
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
