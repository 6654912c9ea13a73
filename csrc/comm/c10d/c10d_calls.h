#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

// c10d's verbs on flat tensors, whose names changed in torch 2.13; the old ones warn since.
namespace trireme {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <typename Group>
WorkPtr all_gather_flat(Group& group, at::Tensor& output, at::Tensor& input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

template <typename Group>
WorkPtr all_gather_flat_list(Group& group, std::vector<at::Tensor>& outputs,
                             std::vector<at::Tensor>& inputs) {
  if constexpr (requires { group.all_gather_single_coalesced(outputs, inputs); }) {
    return group.all_gather_single_coalesced(outputs, inputs);
  } else {
    return group.allgather_into_tensor_coalesced(outputs, inputs);
  }
}

template <typename Group>
WorkPtr reduce_scatter_flat(Group& group, at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) {
  if constexpr (requires { group.reduce_scatter_single(output, input, options); }) {
    return group.reduce_scatter_single(output, input, options);
  } else {
    return group._reduce_scatter_base(output, input, options);
  }
}

// How many elements of a tensor go to each rank, or come from it.
using Splits = std::vector<int64_t>;

// Splits both tensors as told; none: in equal parts.
template <typename Group>
WorkPtr all_to_all_flat(Group& group, at::Tensor& output, at::Tensor& input,
                        Splits output_splits = {}, Splits input_splits = {}) {
  if constexpr (requires { group.all_to_all_single(output, input, output_splits, input_splits); }) {
    return group.all_to_all_single(output, input, output_splits, input_splits);
  } else {
    return group.alltoall_base(output, input, output_splits, input_splits);
  }
}

}  // namespace trireme
