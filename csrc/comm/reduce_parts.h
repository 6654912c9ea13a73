#pragma once

#include <trireme/comm/communicator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

// Reduces `parts` into `output` in rank order, by at::parallel_for. `parts` is, as bytes, the input
// of each of `world` ranks, one after the other, of a dtype that shm/reduce.h knows. CPU tensors,
// contiguous.
void reduce_parts(const at::Tensor& output, const at::Tensor& parts, ReduceOp op, int64_t world);

}  // namespace trireme
