#include <trireme/strategies/horovod/pass_counts.h>

#include <c10/util/Exception.h>

#include <algorithm>

namespace trireme::horovod {

PassCounts::PassCounts(int64_t passes_per_step, RankOf where)
    : where_(where), passes_per_step_(passes_per_step) {
  check(passes_per_step);
}

void PassCounts::check(int64_t passes) const {
  TORCH_CHECK_VALUE(
      passes >= 1,
      error_text(kArea,
                 "got backward_passes_per_step=" + std::to_string(passes) + ", expected 1 or more",
                 where_, "Pass how many backwards a step has."));
}

void PassCounts::set_passes_per_step(int64_t passes, const Refuse& refuse) {
  check(passes);
  if (any())
    refuse(error_text(kArea,
                      "got another backward_passes_per_step after loss.backward() but before "
                      "optimizer.step() or optimizer.synchronize()",
                      where_, "Set it after step()."));
  passes_per_step_ = passes;
}

bool PassCounts::count(size_t parameter, const std::string& name, const Refuse& refuse) {
  if (counts_[parameter] >= passes_per_step_) refuse_one_more(name, refuse);
  return ++counts_[parameter] == passes_per_step_;
}

void PassCounts::refuse_one_more(const std::string& name, const Refuse& refuse) const {
  const std::string text =
      error_text(kArea,
                 "Gradients were computed more than backward_passes_per_step times before call to "
                 "step(): '" +
                     name + "' has had " + std::to_string(passes_per_step_) + " of " +
                     std::to_string(passes_per_step_),
                 where_, "Increase backward_passes_per_step to accumulate gradients locally.");
  refuse(text);
  TORCH_CHECK(false, text);
}

void PassCounts::check_zero_grad(const Refuse& refuse) const {
  if (any())
    refuse(error_text(kArea,
                      "optimizer.zero_grad() was called after loss.backward() but before "
                      "optimizer.step() or optimizer.synchronize()",
                      where_, "Call zero_grad() before the backward, or after the step."));
}

bool PassCounts::any() const {
  return std::any_of(counts_.begin(), counts_.end(), [](int64_t count) { return count > 0; });
}

}  // namespace trireme::horovod
