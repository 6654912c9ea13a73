#pragma once

#include <trireme/activation/checkpoint.h>
#include <trireme/activation/checkpoint_plan.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace trireme {

// Calls the layers of `net` one after the other, from the `begin`-th to in front of the `end`-th.
inline at::Tensor run_layers(torch::nn::Sequential net, int64_t begin, int64_t end,
                             at::Tensor value) {
  for (int64_t i = begin; i < end; ++i) {
    value = (net->begin() + i)->forward(std::move(value));
  }
  return value;
}

// Calls `net` in `segments` runs of layers, all but the last of them checkpointed, as
// torch.utils.checkpoint.checkpoint_sequential does. The layers take and return one tensor. Throws
// ValueError unless 1 <= segments <= layers. See square_root_segments().
inline at::Tensor checkpoint_sequential(torch::nn::Sequential net, int64_t segments,
                                        at::Tensor input, const CheckpointOptions& options = {}) {
  const std::vector<int64_t> bounds = segment_bounds(static_cast<int64_t>(net->size()), segments);
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    const auto run = [net, begin = bounds[i], end = bounds[i + 1]](const at::Tensor& value) {
      return run_layers(net, begin, end, value);
    };
    const bool is_last = i + 2 == bounds.size();
    input = is_last ? run(input) : checkpoint(options, run, input);
  }
  return input;
}

// Calls `net`, checkpointing the layers that `plan` selects (checkpoint_plan()), each by itself.
inline at::Tensor checkpoint_sequential(torch::nn::Sequential net, const CheckpointPlan& plan,
                                        at::Tensor input, const CheckpointOptions& options = {}) {
  TORCH_CHECK_VALUE(plan.recompute.size() == net->size(), "[checkpoint] got a plan for ",
                    plan.recompute.size(), " layers, expected ", net->size(),
                    ". Make it from the costs of this net.");
  for (size_t i = 0; i < net->size(); ++i) {
    const auto run = [net, layer = static_cast<int64_t>(i)](const at::Tensor& value) {
      return run_layers(net, layer, layer + 1, value);
    };
    input = plan.recompute[i] ? checkpoint(options, run, input) : run(input);
  }
  return input;
}

}  // namespace trireme
