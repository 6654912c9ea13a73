#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

namespace trireme {

// This is the arithmetic of a batch normalization whose batch lies on several ranks; nothing here
// communicates. Statistics are per channel (dimension 1), in fp64 for an fp64 input and in fp32 for
// any other. Inputs are dense in their suggested memory format, and may be empty.

TRIREME_API at::ScalarType stats_dtype(const at::Tensor& input);

// Returns one rank's message to the others, 2 x channels + 1 elements: the mean of its part of the
// batch, its biased variance, and how many values that are per channel. Zeros for an empty part.
TRIREME_API at::Tensor local_stats(const at::Tensor& input);

struct BatchStats {
  at::Tensor mean;    // [channels]
  at::Tensor var;     // [channels], biased
  at::Tensor invstd;  // [channels], 1 / sqrt(var + eps)
  at::Tensor counts;  // [world], values per channel on each rank
};

// Returns the statistics of the whole batch from the local_stats of all ranks, [world, 2 x channels
// + 1], by the pairwise update of Chan, Golub and LeVeque (1979) applied to all parts at once: sums
// of squared deviations, never differences of large squares. A batch empty on all ranks has mean
// and variance 0.
TRIREME_API BatchStats combine_stats(const at::Tensor& gathered, double eps);

// Sets running = (1 - momentum) * running + momentum * stats, the variance unbiased; at least 2
// values.
TRIREME_API void update_running_stats(at::Tensor& running_mean, at::Tensor& running_var,
                                      const BatchStats& stats, double momentum);

struct ChannelAffine {
  at::Tensor weight;  // undefined: 1
  at::Tensor bias;    // undefined: 0
};

// Returns (input - mean) * invstd * weight + bias, in the dtype and memory format of the input.
TRIREME_API at::Tensor normalize(const at::Tensor& input, const ChannelAffine& affine,
                                 const BatchStats& stats, double eps);

// Returns the sums of backward over the batch, [2, channels]: the gradient of the output, and that
// times (input - mean). The first is the gradient of the bias, the second times invstd that of the
// weight.
TRIREME_API at::Tensor gradient_sums(const at::Tensor& grad_output, const at::Tensor& input,
                                     const BatchStats& stats);

// Returns the gradient of the input, given the gradient_sums of the whole batch. `stats.var` is not
// used.
TRIREME_API at::Tensor input_gradient(const at::Tensor& grad_output, const at::Tensor& input,
                                      const at::Tensor& weight, const BatchStats& stats,
                                      const at::Tensor& sums);

}  // namespace trireme
