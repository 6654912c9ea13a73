#include <trireme/strategies/fsdp/gradient_delivery.h>

#include <trireme/strategies/fsdp/owner_delivery.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <utility>

namespace trireme {

GradientDelivery::GradientDelivery(const std::vector<std::shared_ptr<ParamGroup>>& groups)
    : copies_(groups.front()->device()) {
  for (const auto& group : groups)
    for (size_t i = 0; i < group->params().size(); ++i)
      owners_.push_back({group.get(), static_cast<int64_t>(i)});
}

std::vector<at::Tensor> GradientDelivery::take(const std::vector<int64_t>& parameters) {
  std::vector<at::Tensor> gradients;
  const auto take_all = [&] {
    for (const int64_t parameter : parameters) {
      const Owner& owner = owners_[static_cast<size_t>(parameter)];
      const at::Tensor& leaf = param(parameter).gradient_leaf();
      const at::Tensor gradient = std::exchange(leaf.mutable_grad(), at::Tensor());
      gradients.push_back(owner.group->memory().to_shard(owner.parameter, gradient));
    }
  };
  const bool copies_any =
      std::any_of(parameters.begin(), parameters.end(),
                  [this](int64_t parameter) { return is_offloaded(parameter); });
  if (!copies_any) {
    take_all();
    return gradients;
  }
  copies_.beside(take_all);
  wait_at_the_end();
  return gradients;
}

// Waits for copies when the backward that runs is over; at once if none does.
void GradientDelivery::wait_at_the_end() {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task == -1) {
    wait();
  } else if (std::exchange(waiting_task_, task) != task) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = shared_from_this()] { self->wait(); });
  }
}

void GradientDelivery::keep(const std::vector<int64_t>& parameters) {
  std::vector<int64_t> offloaded;
  for (const int64_t parameter : parameters) {
    if (is_offloaded(parameter)) offloaded.push_back(parameter);
    delivered_.read(static_cast<size_t>(parameter), memory_of(parameter));
  }
  if (!offloaded.empty()) receive(offloaded);
}

void GradientDelivery::receive(const std::vector<int64_t>& parameters) {
  const std::vector<at::Tensor> parts = take(parameters);
  for (size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor& sharded = param(parameters[i]).sharded();
    at::Tensor& grad = sharded.mutable_grad();
    const bool has_hooks = !torch::autograd::impl::hooks(sharded).empty();
    if (grad.defined() || has_hooks) wait();  // what is added, or shown, is read now
    const at::Tensor part = shown_to_hooks(sharded, parts[i]);
    grad.defined() ? void(grad.add_(part)) : void(grad = part);
  }
}

// Returns nothing where there is no gate at which ranks could compare.
SampledMemory GradientDelivery::memory_of(int64_t parameter) const {
  const ParamGroup& group = *owners_[static_cast<size_t>(parameter)].group;
  if (group.gathers() || group.communicator()->world() == 1) return {};
  return SampledMemory::of(param(parameter).gradient_leaf().grad());
}

FactorRange GradientDelivery::factor() const {
  CommonFactor factor;
  for (size_t i = 0; i < owners_.size(); ++i)
    delivered_.compare(i, memory_of(static_cast<int64_t>(i)), factor);
  return factor.range();
}

void check_factor(const FactorRange& own, const FactorRange& of_all, RankOf where) {
  if (!of_all.is_empty()) return;
  const std::string here =
      own == FactorRange{} ? "" : ", here by " + std::to_string((own.least + own.most) / 2);
  TORCH_CHECK(
      false,
      error_text("fully_shard",
                 "gradients were multiplied by factors that differ between the ranks" + here +
                     ", as torch::nn::utils::clip_grad_norm_ does, which sees the norm of a "
                     "rank's shards only",
                 where,
                 "Clip with model->clip_grad_norm_(max_norm), then do this backward and "
                 "step again."));
}

}  // namespace trireme
