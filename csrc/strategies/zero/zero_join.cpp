#include <trireme/strategies/zero/zero_join.h>

#include <trireme/strategies/zero/zero_optimizer.h>

#include <ATen/ATen.h>

#include <vector>

namespace trireme {
namespace {

enum What : int64_t { kBackward = 1, kClip, kStep };

}  // namespace

bool ZeroJoin::averages() const { return optimizer_.cores().front()->reducer() != nullptr; }

void ZeroJoin::refuse_parts() const {
  TORCH_CHECK_VALUE(
      join_ == nullptr || !averages(),
      error_text(
          "zero",
          "got gradients() in a join, where ranks without inputs do not follow a common norm",
          join_communicator()->rank_of(), "Call the optimizer's own clip_grad_norm_()."));
}

std::shared_ptr<Communicator> ZeroJoin::join_communicator() const {
  return optimizer_.cores().front()->communicator();
}

std::string ZeroJoin::describe(const JoinCall& call) const {
  const std::string what = call.what == kBackward ? "a backward" : "a step";
  return (call.what == kClip ? "clip_grad_norm_(" + std::to_string(call.numbers[0]) + ")" : what) +
         " of ZeroRedundancyOptimizer";
}

void ZeroJoin::enter_join(Join* join, const JoinOptions& /*options*/) {
  join_ = join;
  if (optimizer_.cores().empty() || !averages()) return;
  std::function<void()> armed;
  if (join_ != nullptr) armed = [this] { join_->tell(*this, {kBackward}); };
  optimizer_.cores().front()->trigger()->set_armed_callback(std::move(armed));
}

void ZeroJoin::set_join_divisor(double divisor) {
  for (const auto& core : optimizer_.cores())
    if (core->reducer() != nullptr) core->reducer()->set_divisor(divisor);
}

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
  if (!averages()) share_gradients();
}

// Clears the gradients with which this rank has stepped already.
void ZeroJoin::run_out() { optimizer_.zero_grad(); }

void ZeroJoin::end_join(int64_t /*root*/) { join_->share_options({&optimizer_}); }

void ZeroJoin::follow(const JoinCall& call) {
  if (call.what == kBackward) {
    for (const auto& core : optimizer_.cores()) core->reducer()->shadow_backward();
  } else if (call.what == kClip) {
    optimizer_.clip_grad_norm_(call.numbers[0], call.numbers[1], call.numbers[2] != 0);
  } else {
    optimizer_.step();
    optimizer_.zero_grad();
  }
}

// Stage 1: gives the gradients of the root to the ranks that have run out.
void ZeroJoin::share_gradients() const {
  const at::NoGradGuard no_grad;
  const std::shared_ptr<Communicator> communicator = join_communicator();
  const bool is_root = communicator->rank() == join_->root();
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer_.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());

  // Per parameter: 0 without a gradient, else 1 + its dtype. A step refuses gradients that are not
  // dense.
  at::Tensor kinds = at::zeros({static_cast<int64_t>(parameters.size())}, at::kByte);
  auto* kind = kinds.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& grad = parameters[i].grad();
    if (is_root && grad.defined() && grad.layout() == at::kStrided)
      kind[i] = static_cast<uint8_t>(1 + static_cast<int>(grad.scalar_type()));
  }
  kinds = kinds.to(communicator->device());
  communicator->broadcast({kinds}, join_->root(), "which parameters have gradients").wait();
  kinds = kinds.cpu();
  kind = kinds.mutable_data_ptr<uint8_t>();

  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (join_->has_run_out()) parameters[i].mutable_grad().reset();
    if (kind[i] == 0) continue;
    const auto options = parameters[i].options().dtype(static_cast<at::ScalarType>(kind[i] - 1));
    gradients.push_back(is_root ? parameters[i].grad().contiguous()
                                : at::empty(parameters[i].sizes(), options.requires_grad(false)));
    if (join_->has_run_out()) parameters[i].mutable_grad() = gradients.back();
  }
  if (gradients.empty()) return;
  communicator->broadcast(gradients, join_->root(), "gradients for ranks without inputs").wait();
}

}  // namespace trireme
