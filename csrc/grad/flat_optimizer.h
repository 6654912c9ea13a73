#pragma once

// Gradient path 5/5. In: grad_reducer.h  Out: the parameters, by step()

#include <trireme/common/export.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

// torch's optimizers, stepped by the kernels of kernels/optimizer_step.h: one pass over memory,
// where torch's C++ classes make some ten operators per parameter. Each is torch's class with
// step() replaced: the same options, parameter groups, state and archives (torch::save,
// torch::load), and it goes wherever a torch::optim::Optimizer& does.
//
// What differs: states of bf16 and fp16 parameters are fp32. Results are those of torch's Python
// optimizers with fused=True (optimizer_step.h); those of torch's C++ classes round some terms
// otherwise.
//
// step() throws c10::TypeError for sparse gradients and for other dtypes than optimizer_step.h
// names, and c10::ValueError for a state that does not fit its parameter; nothing is written then.
namespace trireme::optim {

class TRIREME_API Adam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class TRIREME_API AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class TRIREME_API SGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace trireme::optim
