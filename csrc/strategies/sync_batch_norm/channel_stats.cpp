#include <trireme/strategies/sync_batch_norm/channel_stats.h>

#include <ATen/ATen.h>

#include <tuple>
#include <utility>
#include <vector>

// [Note: which operators compute]
// torch has operators for the steps of a synchronized batch normalization (batch_norm_elemt and its
// kin), but for accelerators only. On the CPU the same steps are asked of native_batch_norm, whose
// kernels take the statistics as arguments:
//   normalize      is an evaluation with the batch's statistics as the running ones
//   gradient_sums  are the gradients of weight and bias, with 1 in place of invstd
//   input_gradient is linear in input and grad_output; the part in the input is an evaluation again
// They are vectorized, know channels_last, and take half inputs with fp32 parameters.

namespace trireme {
namespace {

at::Tensor in_stats_dtype(const at::Tensor& parameter, const BatchStats& stats) {
  return parameter.defined() ? parameter.to(stats.mean.scalar_type()) : parameter;
}

at::Tensor evaluate(const at::Tensor& input, const ChannelAffine& affine, const at::Tensor& mean,
                    const at::Tensor& var, double eps) {
  return std::get<0>(at::native_batch_norm(input, affine.weight, affine.bias, mean, var,
                                           /*training=*/false, /*momentum=*/0.0, eps));
}

// Returns values per channel, shaped so that they broadcast over `input`.
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

at::Tensor input_gradient_cpu(const at::Tensor& grad_output, const at::Tensor& input,
                              const at::Tensor& scale, const BatchStats& stats,
                              const at::Tensor& sums) {
  const at::ScalarType dtype = stats.mean.scalar_type();
  const at::Tensor total = stats.counts.sum();
  const ChannelAffine in_input{scale * stats.invstd.square() * sums[1] / -total,
                               scale * sums[0] / -total};
  // Computes in the precision of the statistics up to the end, so that half gradients are rounded
  // once.
  at::Tensor gradient =
      evaluate(input.to(dtype), in_input, stats.mean, at::ones_like(stats.mean), /*eps=*/0.0);
  gradient.addcmul_(grad_output.to(dtype), along_channels(scale, input));
  return gradient.to(input.scalar_type());
}

}  // namespace

at::ScalarType stats_dtype(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor local_stats(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  const auto options = input.options().dtype(stats_dtype(input));
  if (input.numel() == 0) return at::zeros({2 * channels + 1}, options);
  at::Tensor scratch;
  if (input.is_cpu() && input.scalar_type() != stats_dtype(input)) {
    // The CPU operator answers in the dtype of the running statistics, which it also updates.
    scratch = at::zeros({channels}, options);
  }
  const auto [mean, var] = at::batch_norm_update_stats(
      input, scratch, scratch.defined() ? scratch.clone() : scratch, /*momentum=*/0.0);
  const at::Tensor count = at::full({1}, input.numel() / channels, options);
  return at::cat({mean, var, count});
}

BatchStats combine_stats(const at::Tensor& gathered, double eps) {
  const int64_t channels = gathered.size(1) / 2;
  const at::Tensor means = gathered.narrow(1, 0, channels);
  const at::Tensor vars = gathered.narrow(1, channels, channels);
  BatchStats stats;
  stats.counts = gathered.select(1, 2 * channels).contiguous();
  const at::Tensor share = (stats.counts / stats.counts.sum().clamp_min(1)).unsqueeze(1);
  // Measures means from the first rank's: so a difference of means is rounded, not a mean.
  const at::Tensor origin = means.select(0, 0);
  stats.mean = origin + (share * (means - origin)).sum(0);
  stats.var = (share * (vars + (means - stats.mean).square())).sum(0);
  stats.invstd = (stats.var + eps).rsqrt();
  return stats;
}

void update_running_stats(at::Tensor& running_mean, at::Tensor& running_var,
                          const BatchStats& stats, double momentum) {
  const at::Tensor total = stats.counts.sum();
  const auto blend = [&](at::Tensor& running, const at::Tensor& batch) {
    running.copy_(running.to(batch.scalar_type()) * (1 - momentum) + batch * momentum);
  };
  blend(running_mean, stats.mean);
  blend(running_var, stats.var * (total / (total - 1)));
}

at::Tensor normalize(const at::Tensor& input, const ChannelAffine& affine, const BatchStats& stats,
                     double eps) {
  if (input.numel() == 0) return at::empty_like(input);
  const ChannelAffine cast{in_stats_dtype(affine.weight, stats),
                           in_stats_dtype(affine.bias, stats)};
  if (input.is_cpu()) return evaluate(input, cast, stats.mean, stats.var, eps);
  return at::batch_norm_elemt(input, cast.weight, cast.bias, stats.mean, stats.invstd, eps);
}

at::Tensor gradient_sums(const at::Tensor& grad_output, const at::Tensor& input,
                         const BatchStats& stats) {
  if (input.numel() == 0) return at::zeros({2, input.size(1)}, stats.mean.options());
  if (input.is_cpu()) {
    const auto [none, sum_dy_xmu, sum_dy] = at::native_batch_norm_backward(
        grad_output, input, /*weight=*/{}, /*running_mean=*/{}, /*running_var=*/{}, stats.mean,
        at::ones_like(stats.mean), /*train=*/true, /*eps=*/0.0, {false, true, true});
    return at::stack({sum_dy, sum_dy_xmu});
  }
  const auto [sum_dy, sum_dy_xmu, grad_weight, grad_bias] = at::batch_norm_backward_reduce(
      grad_output, input, stats.mean, stats.invstd, /*weight=*/{}, /*input_g=*/true,
      /*weight_g=*/false, /*bias_g=*/false);
  return at::stack({sum_dy, sum_dy_xmu});
}

at::Tensor input_gradient(const at::Tensor& grad_output, const at::Tensor& input,
                          const at::Tensor& weight, const BatchStats& stats,
                          const at::Tensor& sums) {
  if (input.numel() == 0) return at::empty_like(input);
  const at::Tensor cast = in_stats_dtype(weight, stats);
  if (input.is_cpu()) {
    const at::Tensor scale = cast.defined() ? stats.invstd * cast : stats.invstd;
    return input_gradient_cpu(grad_output, input, scale, stats, sums);
  }
  return at::batch_norm_backward_elemt(grad_output, input, stats.mean, stats.invstd, cast, sums[0],
                                       sums[1], stats.counts.to(at::kInt));
}

}  // namespace trireme
