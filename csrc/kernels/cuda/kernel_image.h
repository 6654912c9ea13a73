#pragma once

#include <cuda_runtime_api.h>

// Only .cu files include this header.
namespace trireme::cuda {

// Returns nullptr if the current device can run `kernel`, else CUDA's text for why there is no
// machine code for it. Any other trouble (no device, an error of an earlier kernel) is left to the
// launch.
inline const char* why_no_image(const void* kernel) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      cudaGetLastError();  // clears it, or the next caller would take it for its own
      return cudaGetErrorString(error);
    default:
      return nullptr;
  }
}

}  // namespace trireme::cuda
