#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace trireme {

// Makes a tensor of `numel` zeros of which, on CPU, only written pages take memory; elsewhere an
// ordinary one. So gradients can have their full shape if a rank holds the values of its shards
// only. Throws c10::OutOfMemoryError if there is no address space for it.
TRIREME_API at::Tensor lazy_zeros(int64_t numel, at::ScalarType dtype, c10::Device device);

// Makes elements [begin, begin + numel) of such a tensor zeros again, and gives their pages back.
TRIREME_API void make_zero(const at::Tensor& lazy, int64_t begin, int64_t numel);

// Backs the whole storage of a tensor on CPU by pages at once, which takes a part of what they take
// one by one, as they are touched. Values stay as they are. Does nothing elsewhere, or where the
// system cannot (Linux before 5.14).
TRIREME_API void bring_pages(const at::Tensor& tensor);

// Makes a tensor over a part of a dense tensor's storage, `offset` elements from its begin, which
// is no view in autograd's eyes. Costs 0.1 us, a tenth of the dispatched calls for it.
TRIREME_API at::Tensor range_of(const at::Tensor& buffer, at::IntArrayRef sizes,
                                at::IntArrayRef strides, int64_t offset);

}  // namespace trireme
