#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>

namespace trireme {

// Returns the device whose tensors a group takes, if it takes none on the CPU (NCCL alone); with
// the number of the GPU that the group is bound to, if it is. A group that does not say takes the
// CPU's.
std::optional<c10::Device> only_device_of(c10d::ProcessGroup& group);

}  // namespace trireme
