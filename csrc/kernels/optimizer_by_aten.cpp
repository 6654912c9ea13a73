#include <trireme/kernels/optimizer_by_aten.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/view_as_real.h>

namespace trireme::by_aten {
namespace {

at::Tensor real_of(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// Returns the gradient in the dtype computed in; may be the gradient itself.
template <typename Scalars>
at::Tensor incoming(const OptimizerRow& row, const at::Tensor& param, const Scalars& scalars) {
  at::Tensor grad = real_of(row.grad.resolve_conj()).to(param.scalar_type());
  if (scalars.grad_factor != 1) grad = grad.mul(scalars.grad_factor);
  if (scalars.write_grad) real_of(row.grad).copy_(grad);
  if (scalars.grad_sign < 0) grad = grad.neg();
  return scalars.l2 == 0 ? grad : grad.add(param, scalars.l2);
}

void deliver(const at::Tensor& computed, const at::Tensor& param) {
  if (!computed.is_same(param)) param.copy_(computed);
}

}  // namespace

void step(const OptimizerRow& row, const AdamScalars& scalars) {
  const at::Tensor param = real_of(row.param);
  const at::Tensor computed = param.to(optimizer_state_dtype(param.scalar_type()));
  const at::Tensor grad = incoming(row, computed, scalars);
  const at::Tensor exp_avg = real_of(*row.states[0]);
  const at::Tensor exp_avg_sq = real_of(*row.states[1]);
  exp_avg.lerp_(grad, 1 - scalars.beta1);
  exp_avg_sq.mul_(scalars.beta2).addcmul_(grad, grad, 1 - scalars.beta2);
  at::Tensor mean_sq = exp_avg_sq;
  if (scalars.amsgrad) {
    mean_sq = real_of(*row.states[2]);
    mean_sq.copy_(at::maximum(mean_sq, exp_avg_sq));
  }
  const at::Tensor denominator = mean_sq.sqrt().div_(scalars.root_scale).add_(scalars.eps);
  computed.mul_(scalars.shrink).addcdiv_(exp_avg, denominator, -scalars.step_size);
  deliver(computed, param);
}

void step(const OptimizerRow& row, const SgdScalars& scalars) {
  const at::Tensor param = real_of(row.param);
  const at::Tensor computed = param.to(optimizer_state_dtype(param.scalar_type()));
  at::Tensor grad = incoming(row, computed, scalars);
  if (row.states[0] != nullptr) {
    const at::Tensor momentum_buffer = real_of(*row.states[0]);
    momentum_buffer.mul_(scalars.buffer_share).add_(grad, scalars.grad_share);
    grad = scalars.nesterov ? grad.add(momentum_buffer, scalars.momentum) : momentum_buffer;
  }
  computed.add_(grad, -scalars.lr);
  deliver(computed, param);
}

}  // namespace trireme::by_aten
