#include <trireme/memory/stream_handoff.h>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace trireme {

using c10::impl::VirtualGuardImpl;

void StreamHandoff::beside(const std::function<void()>& work) {
  if (device_.is_cpu()) return work();
  const VirtualGuardImpl device(device_.type());
  if (!side_) {
    side_ = device.getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
    begun_.emplace(device_.type());
    ended_.emplace(device_.type());
  }
  begun_->record(device.getStream(device_));
  begun_->block(*side_);
  const c10::StreamGuard guard(*side_);
  work();
  ended_->record(*side_);
  note();
}

void StreamHandoff::join() {
  if (ended_) ended_->block(VirtualGuardImpl(device_.type()).getStream(device_));
}

void StreamHandoff::note() {
  if (device_.is_cpu()) return;
  const c10::Stream stream = VirtualGuardImpl(device_.type()).getStream(device_);
  auto last = std::find_if(noted_.begin(), noted_.end(),
                           [&](const auto& one) { return one.first == stream; });
  if (last == noted_.end()) last = noted_.emplace(noted_.end(), stream, c10::Event(device_.type()));
  last->second.record(stream);
}

void StreamHandoff::wait() {
  for (const auto& [stream, event] : noted_) event.synchronize();
  noted_.clear();
}

void StreamHandoff::keep(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return;
  const VirtualGuardImpl device(tensor.device().type());
  device.recordDataPtrOnStream(tensor.storage().data_ptr(), device.getStream(tensor.device()));
}

}  // namespace trireme
