#include <trireme/grad/flat_optimizer.h>

#include <trireme/kernels/optimizer_step.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <memory>
#include <tuple>
#include <vector>

namespace trireme::optim {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

at::Tensor call(const Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

template <typename State>
State& state_of(Optimizer& optimizer, const at::Tensor& param) {
  std::unique_ptr<OptimizerParamState>& state = optimizer.state()[param.unsafeGetTensorImpl()];
  if (state == nullptr) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

at::Tensor fresh_state(const at::Tensor& param) {
  return at::zeros_like(param, param.options().dtype(optimizer_state_dtype(param.scalar_type())));
}

template <typename Options>
AdamStepOptions step_options(const Options& options, bool decoupled_weight_decay) {
  AdamStepOptions step;
  step.lr = options.lr();
  std::tie(step.beta1, step.beta2) = options.betas();
  step.eps = options.eps();
  step.weight_decay = options.weight_decay();
  step.decoupled_weight_decay = decoupled_weight_decay;
  step.amsgrad = options.amsgrad();
  return step;
}

template <typename State>
void step_adam(Optimizer& optimizer, OptimizerParamGroup& group, const AdamStepOptions& options) {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs;
  std::vector<int64_t> steps;
  std::vector<State*> states;
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined()) continue;
    State& state = state_of<State>(optimizer, param);
    if (!state.exp_avg().defined()) state.exp_avg(fresh_state(param));
    if (!state.exp_avg_sq().defined()) state.exp_avg_sq(fresh_state(param));
    if (options.amsgrad && !state.max_exp_avg_sq().defined()) {
      state.max_exp_avg_sq(fresh_state(param));
    }
    params.push_back(param);
    grads.push_back(param.grad());
    exp_avgs.push_back(state.exp_avg());
    exp_avg_sqs.push_back(state.exp_avg_sq());
    if (options.amsgrad) max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
    steps.push_back(state.step() + 1);
    states.push_back(&state);
  }
  adam_step({params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, {}, steps}, options);
  for (State* state : states) state->step(state->step() + 1);
}

struct SgdGroup {
  std::vector<at::Tensor> params, grads, momentum_buffers;

  void add(const at::Tensor& param, const at::Tensor& momentum_buffer) {
    params.push_back(param);
    grads.push_back(param.grad());
    if (momentum_buffer.defined()) momentum_buffers.push_back(momentum_buffer);
  }
  void step(const SgdStepOptions& options) const {
    sgd_step({params, grads, momentum_buffers}, options);
  }
};

SgdStepOptions step_options(const torch::optim::SGDOptions& options) {
  SgdStepOptions step;
  step.lr = options.lr();
  step.momentum = options.momentum();
  step.dampening = options.dampening();
  step.weight_decay = options.weight_decay();
  step.nesterov = options.nesterov();
  return step;
}

void step_sgd(Optimizer& optimizer, OptimizerParamGroup& group, SgdStepOptions options) {
  SgdGroup first, later;
  std::vector<torch::optim::SGDParamState*> states;  // of `first`
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined()) continue;
    if (options.momentum == 0) {
      later.add(param, {});
      continue;
    }
    auto& state = state_of<torch::optim::SGDParamState>(optimizer, param);
    if (state.momentum_buffer().defined()) {
      later.add(param, state.momentum_buffer());
    } else {
      first.add(param, fresh_state(param));
      states.push_back(&state);
    }
  }
  later.step(options);
  options.first_step = true;
  first.step(options);
  for (size_t i = 0; i < states.size(); ++i) {
    states[i]->momentum_buffer(first.momentum_buffers[i]);
  }
}

}  // namespace

at::Tensor Adam::step(LossClosure closure) {
  at::Tensor loss = call(closure);
  for (OptimizerParamGroup& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::AdamOptions&>(group.options());
    step_adam<torch::optim::AdamParamState>(*this, group, step_options(options, false));
  }
  return loss;
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss = call(closure);
  for (OptimizerParamGroup& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    step_adam<torch::optim::AdamWParamState>(*this, group, step_options(options, true));
  }
  return loss;
}

at::Tensor SGD::step(LossClosure closure) {
  at::Tensor loss = call(closure);
  for (OptimizerParamGroup& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    step_sgd(*this, group, step_options(options));
  }
  return loss;
}

}  // namespace trireme::optim
