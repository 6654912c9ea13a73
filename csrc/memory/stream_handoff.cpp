#include <trireme/memory/stream_handoff.h>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace trireme {

void StreamHandoff::note() {
  if (device_.is_cpu()) return;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  auto last = std::find_if(noted_.begin(), noted_.end(),
                           [&](const auto& one) { return one.first == stream; });
  if (last == noted_.end()) last = noted_.emplace(noted_.end(), stream, c10::Event(device_.type()));
  last->second.record(stream);
}

void StreamHandoff::wait() {
  for (const auto& [stream, event] : noted_) event.synchronize();
  noted_.clear();
}

}  // namespace trireme
