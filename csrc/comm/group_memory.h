#pragma once

#include <trireme/common/export.h>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>

namespace trireme {

// Returns a function that allocates memory of the group's own backend on `device`, which the
// backend moves best (NCCL: registered with its network), at least aligned as the backend aligns.
// Empty if the backend has none for it. Keeps the group alive; throws what the backend throws.
TRIREME_API std::function<at::DataPtr(int64_t bytes)> memory_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device);

}  // namespace trireme
