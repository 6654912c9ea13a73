#include <trireme/optim/grad_norm.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace trireme {
namespace {

using TensorList = std::vector<at::Tensor>;

// How norms of parts are combined into one.
struct Combining {
  explicit Combining(double norm_type) : power(norm_type) {}

  bool takes_one() const { return std::isinf(power); }
  // Returns the total of no gradients.
  double empty() const { return takes_one() && power < 0 ? -power : 0; }
  ReduceOp op() const {
    if (!takes_one()) return ReduceOp::kSum;
    return power > 0 ? ReduceOp::kMax : ReduceOp::kMin;
  }
  // Returns the total of the norms of single gradients; for 0 how many are not 0, as in torch.
  at::Tensor measure(const at::Tensor& norms) const {
    if (takes_one()) return power > 0 ? norms.max() : norms.min();
    return power == 0 ? norms.ne(0).sum() : norms.pow(power).sum();
  }
  at::Tensor both(const at::Tensor& a, const at::Tensor& b) const {
    if (!takes_one()) return a + b;
    return power > 0 ? at::maximum(a, b) : at::minimum(a, b);
  }
  at::Tensor norm(const at::Tensor& total) const {
    return takes_one() || power == 0 ? total : total.pow(1.0 / power);
  }

  double power;
};

// Splits tensors into lists that _foreach operators take in one call.
std::vector<TensorList> alike(const TensorList& tensors) {
  std::map<std::pair<c10::DeviceType, at::ScalarType>, TensorList> runs;
  for (const at::Tensor& tensor : tensors)
    if (tensor.numel() > 0) runs[{tensor.device().type(), tensor.scalar_type()}].push_back(tensor);
  std::vector<TensorList> lists;
  for (auto& [kind, list] : runs) lists.push_back(std::move(list));
  return lists;
}

// Returns the total of a part as all ranks see it.
at::Tensor measure(const GradNormPart& part, const Combining& how) {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(part.device);
  at::Tensor total = at::full({}, how.empty(), options);
  for (const TensorList& list : alike(part.gradients))
    total = how.both(
        total, how.measure(at::stack(at::_foreach_norm(list, how.power)).to(options)).to(options));
  if (part.sharded_over) {
    part.sharded_over->all_reduce({total}, how.op(), "norm of the gradients").wait();
    if (!how.takes_one()) total /= part.copies;
  }
  return total;
}

// Returns the totals of each pipeline, as all of its ranks see it, and of all other parts.
TensorList totals_of(const std::vector<GradNormPart>& parts, const Combining& how) {
  TensorList totals;
  std::vector<std::pair<Communicator*, at::Tensor>> pipelines;  // in the order of parts
  for (const GradNormPart& part : parts) {
    const at::Tensor total = measure(part, how);
    if (!part.stages) {
      totals.push_back(total);
      continue;
    }
    const auto same = std::find_if(pipelines.begin(), pipelines.end(),
                                   [&](const auto& one) { return one.first == part.stages.get(); });
    if (same == pipelines.end()) {
      pipelines.emplace_back(part.stages.get(), total.to(part.stages->device()));
    } else {
      same->second = how.both(same->second, total.to(part.stages->device()));
    }
  }
  for (auto& [stages, total] : pipelines) {
    stages->all_reduce({total}, how.op(), "norm of the gradients of all stages").wait();
    totals.push_back(total);
  }
  return totals;
}

void check_norm_type(double norm_type, const std::vector<GradNormPart>& parts) {
  TORCH_CHECK_VALUE(
      !std::isnan(norm_type),
      error_text("grad_norm", "got NaN as norm_type, expected a number or an infinity", {},
                 "Pass 2 for the Euclidean norm."));
  const bool is_sharded = std::any_of(parts.begin(), parts.end(), [](const GradNormPart& part) {
    return part.sharded_over || part.stages;
  });
  TORCH_CHECK_VALUE(
      norm_type != 0 || !is_sharded,
      error_text("grad_norm",
                 "got norm_type 0, which counts gradients, for sharded ones, expected another", {},
                 "Pass 2 for the Euclidean norm."));
}

}  // namespace

at::Tensor own_squares(const GradNormPart& part, int64_t world) {
  const at::NoGradGuard no_grad;
  const int64_t holders = (part.sharded_over ? part.sharded_over->world() : 1) *
                          (part.stages ? part.stages->world() : 1);
  TORCH_CHECK_VALUE(holders <= world,
                    error_text("grad_norm",
                               c10::str("got gradients that ", holders,
                                        " ranks hold together, expected at most ", world),
                               {}, "Shard them over the ranks that train the model."));
  TensorList gradients;
  for (const at::Tensor& one : part.gradients)
    gradients.push_back(one.is_sparse() ? one.coalesce()._values() : one);
  at::Tensor sum = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(part.device));
  for (const TensorList& list : alike(gradients)) {
    const at::ScalarType dtype = list.front().scalar_type();
    const bool is_low = dtype == at::kHalf || dtype == at::kBFloat16;
    const auto norms = is_low ? at::_foreach_norm(list, 2, at::kFloat) : at::_foreach_norm(list, 2);
    sum += at::stack(norms).to(sum.options()).square().sum();
  }
  // Each is counted by all ranks that have it.
  return sum * (static_cast<double>(holders) / static_cast<double>(part.copies * world));
}

at::Tensor clip_grad_norm_(const std::vector<GradNormPart>& parts, const ClipOptions& options) {
  check_norm_type(options.norm_type, parts);
  const Combining how(options.norm_type);
  const at::NoGradGuard no_grad;
  const c10::Device device = parts.empty() ? c10::Device(c10::kCPU) : parts.front().device;
  std::optional<at::ScalarType> dtype;
  for (const GradNormPart& part : parts) {
    for (const at::Tensor& gradient : part.gradients) {
      const at::ScalarType real = c10::toRealValueType(gradient.scalar_type());
      dtype = dtype ? c10::promoteTypes(*dtype, real) : real;
    }
  }
  const auto as_number = at::TensorOptions().dtype(at::kDouble).device(device);
  at::Tensor norm = at::full({}, how.empty(), as_number);
  for (const at::Tensor& total : totals_of(parts, how)) norm = how.both(norm, total.to(device));
  norm = parts.empty() ? at::zeros({}, as_number) : how.norm(norm);
  TORCH_CHECK(!options.error_if_nonfinite || at::isfinite(norm).item<bool>(),
              error_text("grad_norm", "got gradients whose norm is not finite, expected a number",
                         {}, "Look for inf and NaN in the loss, or set error_if_nonfinite=False."));
  // Scales as torch does: without waiting for a device, and with the same small number against
  // zero.
  const at::Tensor scale = (options.max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (const GradNormPart& part : parts) {
    for (const TensorList& gradients : {part.gradients, part.counted_elsewhere}) {
      for (const TensorList& list : alike(gradients)) {
        const at::ScalarType real = c10::toRealValueType(list.front().scalar_type());
        at::_foreach_mul_(list, scale.to(list.front().device(), real));
      }
    }
  }
  return norm.to(dtype.value_or(at::kFloat));
}

}  // namespace trireme
