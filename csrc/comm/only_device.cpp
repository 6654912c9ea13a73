#include <trireme/comm/only_device.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

namespace trireme {

std::optional<c10::Device> only_device_of(c10d::ProcessGroup& group) {
  if (!group.hasBackends()) return std::nullopt;
  const auto devices = group.getDeviceTypes();
  if (std::any_of(devices.begin(), devices.end(), [](c10::Device d) { return d.is_cpu(); }))
    return std::nullopt;
  const auto bound = group.getBoundDeviceId();
  return bound ? bound : devices.front();
}

c10::Device device_of_texts(const Communicator& communicator) {
  const auto* owner = dynamic_cast<const HasOnlyDevice*>(&communicator);
  const auto only = owner != nullptr ? owner->only_device() : std::nullopt;
  if (!only) return c10::kCPU;
  return only->has_index() ? *only : c10::impl::VirtualGuardImpl(only->type()).getDevice();
}

}  // namespace trireme
