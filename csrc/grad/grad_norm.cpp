#include <trireme/grad/grad_norm.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace trireme {
namespace {

using TensorList = std::vector<at::Tensor>;

bool is_largest(double norm_type) { return std::isinf(norm_type); }

// What _foreach operators take in one call.
std::vector<TensorList> alike(const TensorList& tensors) {
  std::map<std::pair<c10::DeviceType, at::ScalarType>, TensorList> runs;
  for (const at::Tensor& tensor : tensors)
    if (tensor.numel() > 0) runs[{tensor.device().type(), tensor.scalar_type()}].push_back(tensor);
  std::vector<TensorList> lists;
  for (auto& [kind, list] : runs) lists.push_back(std::move(list));
  return lists;
}

// The sum of powers, or the largest magnitude, of a part: as all ranks see it.
at::Tensor measure(const GradNormPart& part, const ClipOptions& options) {
  at::Tensor total = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(part.device));
  for (const TensorList& list : alike(part.gradients)) {
    const at::Tensor norms =
        at::stack(at::_foreach_norm(list, options.norm_type)).to(total.options());
    total = is_largest(options.norm_type) ? at::maximum(total, norms.max())
                                          : total + norms.pow(options.norm_type).sum();
  }
  if (part.sharded_over) {
    const ReduceOp op = is_largest(options.norm_type) ? ReduceOp::kMax : ReduceOp::kSum;
    part.sharded_over->all_reduce({total}, op, "norm of the gradients").wait();
    if (!is_largest(options.norm_type)) total /= part.copies;
  }
  return total;
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<GradNormPart>& parts, const ClipOptions& options) {
  TORCH_CHECK_VALUE(options.norm_type > 0,
                    error_text("grad_norm",
                               "got norm_type " + std::to_string(options.norm_type) +
                                   ", expected a positive number or infinity",
                               {}, "Pass 2 for the Euclidean norm."));
  const at::NoGradGuard no_grad;
  const c10::Device device = parts.empty() ? c10::Device(c10::kCPU) : parts.front().device;
  std::optional<at::ScalarType> dtype;
  for (const GradNormPart& part : parts) {
    for (const at::Tensor& gradient : part.gradients) {
      const at::ScalarType real = c10::toRealValueType(gradient.scalar_type());
      dtype = dtype ? c10::promoteTypes(*dtype, real) : real;
    }
  }
  at::Tensor norm = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  for (const GradNormPart& part : parts) {
    const at::Tensor of_part = measure(part, options).to(device);
    norm = is_largest(options.norm_type) ? at::maximum(norm, of_part) : norm + of_part;
  }
  if (!is_largest(options.norm_type)) norm = norm.pow(1.0 / options.norm_type);
  TORCH_CHECK(!options.error_if_nonfinite || at::isfinite(norm).item<bool>(),
              error_text("grad_norm", "got gradients whose norm is not finite, expected a number",
                         {}, "Look for inf and NaN in the loss, or set error_if_nonfinite=False."));
  // Scales as torch does: without waiting for a device, and with the same small number against
  // zero.
  const at::Tensor scale = (options.max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (const GradNormPart& part : parts)
    for (const TensorList& list : alike(part.gradients))
      at::_foreach_mul_(
          list, scale.to(list.front().device(), c10::toRealValueType(list.front().scalar_type())));
  return norm.to(dtype.value_or(at::kFloat));
}

}  // namespace trireme
