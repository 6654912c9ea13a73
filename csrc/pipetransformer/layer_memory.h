#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// [Note: a layer that a rank does not hold]
//
// Its parameters and buffers stay the tensors that they are, of the same sizes and dtype, so that
// optimizers, schedulers and the module go on with them; they have no memory. Whoever reads one
// gets an error with a text of ours, but under torch 2.11, which cannot refuse
// (memory/storage_access.h). No rank computes with such a layer, so that its parameters get no
// gradients and an optimizer leaves them out.

// Takes a tensor's memory away. What shares its storage keeps it. Does nothing for a tensor without
// elements, or without memory.
TRIREME_API void free_memory(const at::Tensor& tensor, const std::string& text);

// Returns whether a tensor has its memory.
TRIREME_API bool has_memory(const at::Tensor& tensor);

// Returns the strides that a tensor's values have in memory without gaps: its own, where these
// leave none, else those of its dimensions in order.
TRIREME_API std::vector<int64_t> memory_strides(const at::Tensor& tensor);

// Returns a tensor with memory of its own, not initialized, of the sizes, dtype and device of one
// that may have none, and of its memory_strides().
TRIREME_API at::Tensor memory_like(const at::Tensor& tensor);

// Gives a tensor the memory of `memory`, which memory_like() has made of it.
TRIREME_API void take_memory(const at::Tensor& tensor, const at::Tensor& memory);

}  // namespace trireme
