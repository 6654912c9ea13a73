#pragma once

#include <trireme/kernels/cuda/flatten_table.h>

// The interface between torch's side (flatten_cuda.cpp) and the kernels (flatten.cu), which lie in
// another library: torch's side calls them through cuda_kernels.h.
namespace trireme::cuda {

enum class FlattenMove : uint8_t { kFlatten, kAccumulate, kUnflatten };

// Returns nullptr if the kernels run on the current device, else the reason: there are none for
// that GPU. The first question on a device loads them.
const char* why_no_flatten();

// Launches once, asynchronously, on `stream` (a cudaStream_t), whose device must be the current
// one; the table is copied before it returns. Returns nullptr, or CUDA's text of the error.
const char* launch_flatten(const FlattenTable& table, FlattenMove move, void* stream);

}  // namespace trireme::cuda
