#include <trireme/optim/flat_optimizer.h>

#include <trireme/common/error.h>
#include <trireme/kernels/optimizer_step.h>
#include <trireme/optim/write_gate.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trireme::optim {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

// Runs the closure and passes the gates, before the first write.
at::Tensor begin_step(const Optimizer& optimizer, const Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  pass_gates(optimizer);
  return loss;
}

// Parameters of the same sizes on all ranks would take each other's states unnoticed.
constexpr const char* kHeldParts = "trireme_held_parts";

// Names the rank whose shards the parameters are; empty if they are whole.
std::string held_parts(const Optimizer& optimizer) {
  std::string all, last;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      const std::shared_ptr<WriteGate> gate = gate_of(param);
      const std::string own = gate ? gate->held_part() : std::string();
      if (own == last) continue;
      all += (all.empty() ? "" : ", ") + (own.empty() ? "all" : own);
      last = own;
    }
  }
  return all;
}

void write_held_parts(const Optimizer& optimizer, torch::serialize::OutputArchive& archive) {
  const std::string own = held_parts(optimizer);
  if (!own.empty()) archive.write(kHeldParts, c10::IValue(own));
}

void check_held_parts(const Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  const auto said = [](const std::string& parts) {
    return parts.empty() ? std::string("whole parameters") : "the shards of " + parts;
  };
  c10::IValue line;
  const bool is_said = archive.try_read(kHeldParts, line) && line.isString();
  const std::string saved = is_said ? line.toStringRef() : std::string();
  const std::string own = held_parts(optimizer);
  TORCH_CHECK_VALUE(
      saved == own,
      error_text(
          "optim",
          "got an archive with the state of " + said(saved) + ", expected that of " + said(own), {},
          "Save and load by trireme::save_checkpoint and load_checkpoint, or "
          "keep a file per rank."));
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
AdamStepOptions adam_options(const OptimizerParamGroup& group, bool decoupled_weight_decay) {
  const auto& options = static_cast<const Options&>(group.options());
  AdamStepOptions step;
  step.lr = options.lr();
  std::tie(step.beta1, step.beta2) = options.betas();
  step.eps = options.eps();
  step.weight_decay = options.weight_decay();
  step.decoupled_weight_decay = decoupled_weight_decay;
  step.amsgrad = options.amsgrad();
  return step;
}
AdamStepOptions adam_options(const Adam& /*optimizer*/, const OptimizerParamGroup& group) {
  return adam_options<torch::optim::AdamOptions>(group, false);
}
AdamStepOptions adam_options(const AdamW& /*optimizer*/, const OptimizerParamGroup& group) {
  return adam_options<torch::optim::AdamWOptions>(group, true);
}

// The next step of some parameters of a group, and the owners of its states.
template <typename State>
struct NextAdamStep {
  AdamStates lists;
  std::vector<State*> states;

  void count() const {
    for (State* state : states) state->step(state->step() + 1);
  }
};

template <typename State>
NextAdamStep<State> next_adam_step(Optimizer& optimizer, const std::vector<at::Tensor>& params,
                                   const AdamStepOptions& options) {
  NextAdamStep<State> next;
  next.lists.options = options;
  for (const at::Tensor& param : params) {
    State& state = state_of<State>(optimizer, param);
    if (!state.exp_avg().defined()) state.exp_avg(fresh_state(param));
    if (!state.exp_avg_sq().defined()) state.exp_avg_sq(fresh_state(param));
    if (options.amsgrad && !state.max_exp_avg_sq().defined()) {
      state.max_exp_avg_sq(fresh_state(param));
    }
    next.lists.exp_avgs.push_back(state.exp_avg());
    next.lists.exp_avg_sqs.push_back(state.exp_avg_sq());
    if (options.amsgrad) next.lists.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
    next.lists.step_numbers.push_back(state.step() + 1);
    next.states.push_back(&state);
  }
  return next;
}

template <typename State>
void step_adam(Optimizer& optimizer, OptimizerParamGroup& group, const AdamStepOptions& options) {
  std::vector<at::Tensor> params, grads;
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined()) continue;
    params.push_back(param);
    grads.push_back(param.grad());
  }
  const NextAdamStep<State> next = next_adam_step<State>(optimizer, params, options);
  const auto& [exp_avgs, exp_avg_sqs, max_exp_avg_sqs, numbers, same_options] = next.lists;
  adam_step({params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, {}, numbers}, same_options);
  next.count();
}

template <typename State>
AdamStates count_adam_step(Optimizer& optimizer, const std::vector<at::Tensor>& params,
                           const AdamStepOptions& options) {
  NextAdamStep<State> next = next_adam_step<State>(optimizer, params, options);
  next.count();
  return std::move(next.lists);
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
  std::vector<torch::optim::SGDParamState*> states;  // states of `first`
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
  at::Tensor loss = begin_step(*this, closure);
  for (OptimizerParamGroup& group : param_groups_)
    step_adam<torch::optim::AdamParamState>(*this, group, adam_options(*this, group));
  return loss;
}

void Adam::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::Adam::save(archive);
  write_held_parts(*this, archive);
}

void Adam::load(torch::serialize::InputArchive& archive) {
  check_held_parts(*this, archive);
  torch::optim::Adam::load(archive);
}

AdamStates Adam::count_step(const OptimizerParamGroup& group,
                            const std::vector<at::Tensor>& params) {
  return count_adam_step<torch::optim::AdamParamState>(*this, params, adam_options(*this, group));
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss = begin_step(*this, closure);
  for (OptimizerParamGroup& group : param_groups_)
    step_adam<torch::optim::AdamWParamState>(*this, group, adam_options(*this, group));
  return loss;
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::AdamW::save(archive);
  write_held_parts(*this, archive);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  check_held_parts(*this, archive);
  torch::optim::AdamW::load(archive);
}

AdamStates AdamW::count_step(const OptimizerParamGroup& group,
                             const std::vector<at::Tensor>& params) {
  return count_adam_step<torch::optim::AdamWParamState>(*this, params, adam_options(*this, group));
}

at::Tensor SGD::step(LossClosure closure) {
  at::Tensor loss = begin_step(*this, closure);
  for (OptimizerParamGroup& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    step_sgd(*this, group, step_options(options));
  }
  return loss;
}

void SGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::SGD::save(archive);
  write_held_parts(*this, archive);
}

void SGD::load(torch::serialize::InputArchive& archive) {
  check_held_parts(*this, archive);
  torch::optim::SGD::load(archive);
}

}  // namespace trireme::optim
