#pragma once

#include <trireme/comm/value.h>
#include <trireme/comm/value_check.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace trireme::values {

// [Note: a value as one tensor]
//
// An engine that moves tensors moves a value, with the tensors in it, as one tensor of bytes: three
// numbers of 8 bytes, which say how long the parts behind them are; the bytes of the value
// (value_codec.h); the description of its tensors (shm/packed_tensors.h); and what these hold. Each
// part begins at a multiple of 64 bytes, and the whole takes one, so that such tensors may lie one
// behind the other.

// Returns a value as bytes in CPU memory. Tensors on a device are copied from there. Throws what
// check_value() does, and c10::TypeError for a Ref; `origin` is for errors.
TRIREME_API at::Tensor pack_value(const Value& value, const ValueOrigin& origin);

// Returns the value that pack_value() has packed, from contiguous bytes in CPU memory. Its tensors
// are on the CPU, with memory of their own. Throws c10::ValueError for other bytes.
TRIREME_API Value unpack_value(const at::Tensor& bytes);

}  // namespace trireme::values
