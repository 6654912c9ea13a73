#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

// Returns a number for the bits of a tensor's elements in row-major order, the same on every
// machine of one byte order: how ranks find out whether they hold the same values. Not against who
// looks for a collision. `tensor`: dense, of any dtype, strides and device. Costs one pass over it,
// at the speed of memory; a copy where it has gaps or is not on the CPU.
TRIREME_API uint64_t hash_of_values(const at::Tensor& tensor);

}  // namespace trireme
