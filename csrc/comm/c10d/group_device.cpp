#include <trireme/comm/c10d/group_device.h>

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

}  // namespace trireme
