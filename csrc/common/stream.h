#pragma once

#include <trireme/common/export.h>

#include <c10/core/Device.h>

namespace trireme {

// Returns the native handle of the caller's current stream on `device` (a cudaStream_t on CUDA;
// nullptr there is the legacy default stream). Returns nullptr for devices without streams, such as
// the CPU. Goes through c10's device interface, so that nothing here links against c10_cuda.
TRIREME_API void* current_stream_handle(c10::Device device);

}  // namespace trireme
