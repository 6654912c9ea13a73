#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <c10/core/Device.h>

#include <optional>

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trireme {

// The device whose tensors a group takes, where those of the CPU are not among them (NCCL alone);
// with the number of the GPU that the group is bound to, if it is. A group that does not say takes
// the CPU's.
std::optional<c10::Device> only_device_of(c10d::ProcessGroup& group);

// A communicator that can say so of its group.
struct HasOnlyDevice {
  virtual ~HasOnlyDevice() = default;
  virtual std::optional<c10::Device> only_device() const = 0;
};

// Where texts (gather_texts.h) and numbers lie for `communicator` to move them: the CPU, or the GPU
// of such a group, which is the caller's current one if the group is bound to none.
TRIREME_API c10::Device device_of_texts(const Communicator& communicator);

}  // namespace trireme
