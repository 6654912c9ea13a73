#include <trireme/strategies/zero/zero_join.h>

#include <trireme/strategies/zero/zero_optimizer.h>

#include <ATen/ATen.h>

#include <vector>

namespace trireme {
namespace {

enum What : int64_t { kBackward = 1, kClip, kStep };

}  // namespace

bool ZeroJoin::averages() const { return optimizer_.cores().all().front()->reducer() != nullptr; }

void ZeroJoin::refuse_parts() const {
  TORCH_CHECK_VALUE(
      join_ == nullptr || !averages(),
      error_text(
          "zero",
          "got gradients() in a join, where ranks without inputs do not follow a common norm",
          join_communicator()->rank_of(), "Call the optimizer's own clip_grad_norm_()."));
}

std::shared_ptr<Communicator> ZeroJoin::join_communicator() const {
  return optimizer_.cores().all().front()->communicator();
}

std::string ZeroJoin::describe(const JoinCall& call) const {
  const std::string what = call.what == kBackward ? "a backward" : "a step";
  return (call.what == kClip ? "clip_grad_norm_(" + std::to_string(call.numbers[0]) + ")" : what) +
         " of ZeroRedundancyOptimizer";
}

void ZeroJoin::enter_join(Join* join, const JoinOptions& /*options*/) {
  join_ = join;
  std::function<void()> armed;
  if (join_ != nullptr) armed = [this] { join_->tell(*this, {kBackward}); };
  optimizer_.cores().set_armed_callback(armed);
}

void ZeroJoin::set_join_divisor(double divisor) { optimizer_.cores().set_divisor(divisor); }

// Under stage 1 each rank with inputs clips whole gradients, and the others get these.
void ZeroJoin::before_clip(double max_norm, double norm_type, bool error_if_nonfinite) {
  if (join_ == nullptr || !averages()) return;
  join_->tell(*this, {kClip, 0, {max_norm, norm_type, error_if_nonfinite ? 1. : 0.}});
}

void ZeroJoin::before_step() {
  if (join_ == nullptr) return;
  join_->tell(*this, {kStep});
  if (!join_->any_has_run_out()) return;
  join_->share_options({&optimizer_});
  if (averages()) return;
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer_.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  join_->meeting().share_gradients(parameters);
}

// Clears the gradients with which this rank has stepped already.
void ZeroJoin::run_out() { optimizer_.zero_grad(); }

void ZeroJoin::end_join(int64_t /*root*/) { join_->share_options({&optimizer_}); }

void ZeroJoin::follow(const JoinCall& call) {
  if (call.what == kBackward) {
    optimizer_.cores().shadow_backward();
  } else if (call.what == kClip) {
    optimizer_.clip_grad_norm_(call.numbers[0], call.numbers[1], call.numbers[2] != 0);
  } else {
    optimizer_.step();
    optimizer_.zero_grad();
  }
}

}  // namespace trireme
