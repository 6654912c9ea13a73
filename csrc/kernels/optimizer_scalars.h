#pragma once

#include <trireme/common/export.h>

#include <cstdint>

// The arguments of the optimizers' kernels, without torch, so that .cu files see them too.
namespace trireme {

// The options of torch.optim.Adam and AdamW, by their names.
struct AdamStepOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled_weight_decay = false;  // AdamW's
  bool amsgrad = false;
  bool maximize = false;
};

// The options of torch.optim.SGD.
struct SgdStepOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  bool first_step = false;  // momentum_buffer holds zeros and becomes the gradient, not dampened
};

// The options of torch.optim.Adagrad, by their names, without decays.
struct AdagradStepOptions {
  double lr = 1e-2;
  double eps = 1e-10;
};

// Adjacent elements of one parameter with their gradient and states; not owned. The states are
// fp32, or fp64 for an fp64 parameter. SGD keeps momentum_buffer in `exp_avg`, Adagrad the sum of
// squares in `exp_avg_sq`.
struct OptimizerSegment {
  void* param = nullptr;
  void* grad = nullptr;            // written only if the scalars say write_grad
  void* exp_avg = nullptr;         // nullptr for SGD without momentum, and for Adagrad
  void* exp_avg_sq = nullptr;      // nullptr for SGD
  void* max_exp_avg_sq = nullptr;  // nullptr unless amsgrad
  int64_t numel = 0;
};

// The numbers that a step computes once for all elements.
struct AdamScalars {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double grad_factor;  // multiplies gradients first
  double grad_sign;    // -1 to maximize
  double shrink;       // decoupled weight decay: 1 - lr * weight_decay
  double l2;           // the other weight decay
  double step_size;    // lr / (1 - beta1^step)
  double root_scale;   // sqrt(1 - beta2^step)
  bool amsgrad;
  bool write_grad;  // store grad_factor * grad in grad, as GradScaler's protocol wants
};

struct SgdScalars {
  double lr;
  double grad_factor;
  double grad_sign;
  double l2;
  double momentum;
  double buffer_share;  // share of momentum_buffer in its next value: momentum, 0 in the first step
  double grad_share;    // share of the gradient: 1 - dampening, 1 in the first step
  bool nesterov;
  bool write_grad;
};

struct AdagradScalars {
  double lr;
  double eps;
  double grad_factor;
  bool write_grad;
};

// Compute the numbers of a step in fp64, as torch does; `step` counts from 1.
TRIREME_API AdamScalars adam_scalars(const AdamStepOptions& options, double step);
TRIREME_API SgdScalars sgd_scalars(const SgdStepOptions& options);
TRIREME_API AdagradScalars adagrad_scalars(const AdagradStepOptions& options);

}  // namespace trireme
