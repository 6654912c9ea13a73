#include <trireme/grad/transport_switch.h>

#include <trireme/memory/warm_heap.h>

#include <algorithm>

namespace trireme {
namespace {

// The number of gradients that a stream of deposits usually holds at most.
constexpr int64_t kGradientsInFlight = 4;

int64_t largest_gradient_bytes(const std::vector<ParameterInfo>& infos) {
  int64_t largest = 0;
  for (const ParameterInfo& info : infos)
    largest = std::max(largest,
                       info.numel * static_cast<int64_t>(c10::elementSize(info.gradient_dtype())));
  return largest;
}

}  // namespace

void TransportSwitch::replace(std::unique_ptr<Transport> transport) {
  own_ = std::move(transport);
  stream_.reset();
  chosen_ = own_.get();
}

void TransportSwitch::ask_for_stream(const std::shared_ptr<Communicator>& ranks,
                                     const BucketLayout& layout,
                                     const StreamTransport::Options& options) {
  if (!own_->traits().may_become_stream || !StreamTransport::takes(layout.plan())) return;
  if (std::exchange(has_asked_, true)) return;
  stream_ = StreamTransport::make(ranks, options);
  if (stream_) keep_heap_warm(kGradientsInFlight * largest_gradient_bytes(layout.infos()));
}

Transport& TransportSwitch::choose(const BucketLayout& layout) {
  const bool streams = stream_ && !layout.scatters() && StreamTransport::takes(layout.plan());
  chosen_ = streams ? stream_.get() : own_.get();
  return *chosen_;
}

}  // namespace trireme
