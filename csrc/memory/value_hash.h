#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace trireme {

// Returns a hash of the bits of a tensor's elements in row-major order, the same on every machine
// of one byte order, by which ranks compare their values. No protection against a deliberate
// collision. `tensor`: dense, of any dtype, strides and device. Costs one pass over it, at the
// speed of memory; a copy if it has gaps or is not on the CPU.
TRIREME_API uint64_t hash_of_values(const at::Tensor& tensor);

// Returns the hash of bytes that lie together, which is that of a tensor over them.
TRIREME_API uint64_t hash_of_bytes(const void* data, size_t bytes);

}  // namespace trireme
