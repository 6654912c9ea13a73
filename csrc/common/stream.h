#pragma once

#include <trireme/common/export.h>

#include <c10/core/Device.h>

namespace trireme {

// The native handle of the caller's current stream on `device` (a cudaStream_t on CUDA; nullptr
// there is the legacy default stream). Devices without streams, such as the CPU, give nullptr. It
// goes through c10's device interface, so that nothing here links against c10_cuda.
TRIREME_API void* current_stream_handle(c10::Device device);

}  // namespace trireme
