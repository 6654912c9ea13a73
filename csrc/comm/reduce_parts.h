#pragma once

#include <trireme/comm/communicator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

// `parts` is, as bytes, what each of `world` ranks has for `output`, one after the other; of a
// dtype that shm/reduce.h knows. Reduces them in rank order, by at::parallel_for. CPU tensors,
// contiguous.
void reduce_parts(const at::Tensor& output, const at::Tensor& parts, ReduceOp op, int64_t world);

}  // namespace trireme
