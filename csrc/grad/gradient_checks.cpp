#include <trireme/grad/gradient_checks.h>

#include <trireme/grad/gradient_graphs.h>

#include <c10/util/Exception.h>

namespace trireme {

void GradientChecks::expect(bool is_fine, const char* text, const Advice& advice) const {
  TORCH_CHECK(is_fine, error_text(area_, text, where_, in_language(advice)));
}

void GradientChecks::refuse_after(const std::string& failure, bool begins_with_backward) const {
  C10_THROW_ERROR(DistBackendError,
                  error_text(area_,
                             (begins_with_backward ? "got a backward" : "got a forward") +
                                 (" after the group had failed: " + failure),
                             where_,
                             std::string("Destroy the process group, initialise it again and ") +
                                 (begins_with_backward ? "make the optimizer anew."
                                                       : "wrap the module anew.")));
}

void GradientChecks::check(const at::Tensor& parameter, const std::string& name) {
  if (!parameter.grad().defined()) {
    refuse(name,
           "without its gradient, expected it in .grad: a post-accumulate-grad hook took it before "
           "it was averaged",
           "Register the optimizer with _apply_optimizer_in_backward before the first forward, or "
           "step after backward.");
  }
}

void GradientChecks::check_graph(const at::Tensor& parameter, bool is_kept) const {
  if (where_.rank != 0 || !has_graph(parameter.grad())) return;
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

std::string GradientChecks::text_of_abandoned(int64_t step, const std::string& last,
                                              const std::string& why) const {
  std::string cause = refused_;
  if (cause.empty())
    cause = why.empty() ? "An exception left it; see the traceback of that rank"
                        : "An exception left it: " + why;
  return error_text(
      area_,
      "backward " + std::to_string(step) + " was abandoned " +
          (last.empty() ? "before any gradient arrived" : "after the gradient of '" + last + "'"),
      where_, cause);
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
