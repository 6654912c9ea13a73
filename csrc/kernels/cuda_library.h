#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/cuda/cuda_kernels.h>

namespace trireme::cuda {

// libtrireme_cuda holds the kernels and brings the CUDA runtime. The first call opens it, which
// comes only once there is a tensor on a GPU. Any thread.

// Returns nullptr if it cannot be opened: this build has none, or the machine has no CUDA runtime.
TRIREME_API const CudaKernels* cuda_kernels();

// Returns nullptr if the kernels run on the current device, by the answer of the library's `ask`,
// else the reason, in a text that lives for ever.
TRIREME_API const char* why_no_cuda(const char* (*CudaKernels::*ask)());

// The next step in messages that the kernels are missing.
inline constexpr const char* kHowToGetCudaKernels =
    "Build Trireme with TRIREME_CUDA=ON where nvcc is, of torch's CUDA version, for this GPU "
    "(CUDAARCHS).";

}  // namespace trireme::cuda
