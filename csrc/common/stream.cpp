#include <trireme/common/stream.h>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace trireme {

void* current_stream_handle(c10::Device device) {
  // Guards of these devices exist, but throw when asked for a native handle.
  if (device.is_cpu() || device.is_meta()) return nullptr;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

}  // namespace trireme
