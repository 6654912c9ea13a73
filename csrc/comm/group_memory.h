#pragma once

#include <trireme/common/export.h>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>

namespace trireme {

// Gives memory of the group's own backend, which it moves best (NCCL: registered with its network):
// returns a function for so many bytes on `device`, at least aligned as the backend aligns. It is
// empty if the backend has none for it. Keeps the group alive; throws what the backend throws.
TRIREME_API std::function<at::DataPtr(int64_t bytes)> memory_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device);

}  // namespace trireme
