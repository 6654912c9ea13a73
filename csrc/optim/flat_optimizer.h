#pragma once

// Gradient path 5/5. In: grad_delivery.h (through .grad)  Out: the parameters, by step()

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_step.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <vector>

// torch's optimizers, stepped by the kernels of kernels/optimizer_step.h: one pass over memory,
// where torch's C++ classes make some ten operators per parameter. Each is torch's class with
// step() replaced: the same options, parameter groups, state and archives (torch::save,
// torch::load), and it can be passed as a torch::optim::Optimizer&.
//
// Over shards (fully_shard) an archive names its rank, and load() throws c10::ValueError for that
// of another one; torch's classes do not. save_checkpoint() (saving/module_checkpoint.h) has no
// such bounds.
//
// The states of bf16 and fp16 parameters are fp32, which torch's are not. Results are those of
// torch's Python optimizers with fused=True (optimizer_step.h); those of torch's C++ classes round
// some terms otherwise.
//
// step() asks the gates of its parameters (write_gate.h), so that trireme::step() is not needed. It
// throws what they do, c10::TypeError for sparse gradients and for other dtypes than those of
// optimizer_step.h, and c10::ValueError for a state that does not fit its parameter; nothing is
// written then.
namespace trireme::optim {

// The states and options of a step of Adam or AdamW. Lists as in AdamLists (optimizer_step.h).
struct AdamStates {
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;
  std::vector<int64_t> step_numbers;
  AdamStepOptions options;
};

class TRIREME_API Adam : public torch::optim::Adam, public KeepsWideStates {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  // Counts a step of `params`, which `group` holds, that the caller makes in place of step(),
  // because the gradients are not in .grad. Makes missing states.
  AdamStates count_step(const torch::optim::OptimizerParamGroup& group,
                        const std::vector<at::Tensor>& params);
};

class TRIREME_API AdamW : public torch::optim::AdamW, public KeepsWideStates {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  // Counts a step as Adam's count_step() does.
  AdamStates count_step(const torch::optim::OptimizerParamGroup& group,
                        const std::vector<at::Tensor>& params);
};

class TRIREME_API SGD : public torch::optim::SGD, public KeepsWideStates {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace trireme::optim
