#include <trireme/common/error.h>
#include <trireme/strategies/fsdp/fsdp.h>
#include <trireme/strategies/fsdp/offload_plan.h>
#include <trireme/strategies/fsdp/sharded_module.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

// Gradients on their way from the device that computes to the CPU memory in which the optimizer
// works; and what of a C++ unit lies there.

namespace trireme {

std::vector<at::Tensor> Fsdp::take_gradients(const std::vector<int64_t>& parameters) {
  std::vector<at::Tensor> gradients;
  const auto take = [&] {
    for (const int64_t parameter : parameters) {
      const Owner& owner = owners_[static_cast<size_t>(parameter)];
      const at::Tensor& leaf = param_of(owner).gradient_leaf();
      const at::Tensor gradient = std::exchange(leaf.mutable_grad(), at::Tensor());
      gradients.push_back(owner.group->memory().to_shard(owner.parameter, gradient));
    }
  };
  if (std::none_of(parameters.begin(), parameters.end(),
                   [this](int64_t parameter) { return is_offloaded(parameter); })) {
    take();
    return gradients;
  }
  copied_gradients_.beside(take);
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task == -1) {
    wait_for_gradients();
  } else if (std::exchange(waiting_task_, task) != task) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = shared_from_this()] { self->wait_for_gradients(); });
  }
  return gradients;
}

void Fsdp::receive_gradients(const std::vector<int64_t>& parameters) {
  const std::vector<at::Tensor> parts = take_gradients(parameters);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Owner& owner = owners_[static_cast<size_t>(parameters[i])];
    at::Tensor& grad = param_of(owner).sharded().mutable_grad();
    if (grad.defined()) wait_for_gradients();  // what is added is read now
    grad.defined() ? void(grad.add_(parts[i])) : void(grad = parts[i]);
  }
}

void ShardedModule::settle_offload(ParamGroupRequest& request) const {
  if (!options_.offload) return;
  const Offload& offload = *options_.offload;
  const RankOf where = options_.communicator->rank_of();
  check_offload(offload, where);
  if (device_.is_cpu() && !offload.from_cpu) {
    if (where.rank != 0) return;
    TORCH_WARN_ONCE("[fully_shard] Offload: parameters are in CPU memory already");
    return;
  }
  std::vector<int64_t> parameter_bytes;
  for (const ShardedParamSpec& spec : request.specs) {
    const auto item = static_cast<int64_t>(c10::elementSize(spec.dtype));
    parameter_bytes.push_back(item * c10::multiply_integers(spec.sizes));
  }
  const OffloadPlan plan =
      make_offload_plan({offload.optimizer, offload.params, parameter_bytes, *offload.owed});
  *offload.owed = plan.owed;
  for (size_t i = 0; i < request.specs.size(); ++i) request.specs[i].offload = plan.parameters[i];
  request.pins_memory = offload.pin_memory;
}

}  // namespace trireme
