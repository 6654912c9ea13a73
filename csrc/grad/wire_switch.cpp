#include <trireme/grad/wire_switch.h>

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

void WireSwitch::replace(std::unique_ptr<Wire> wire) {
  own_ = std::move(wire);
  stream_.reset();
  chosen_ = own_.get();
}

void WireSwitch::ask_for_stream(const std::shared_ptr<Communicator>& ranks,
                                const BucketLayout& layout, const StreamWire::Options& options) {
  if (!own_->traits().may_become_stream || !StreamWire::takes(layout.plan())) return;
  if (std::exchange(has_asked_, true)) return;
  stream_ = StreamWire::make(ranks, options);
  if (stream_) keep_heap_warm(kGradientsInFlight * largest_gradient_bytes(layout.infos()));
}

Wire& WireSwitch::choose(const BucketLayout& layout) {
  const bool streams = stream_ && !layout.scatters() && StreamWire::takes(layout.plan());
  chosen_ = streams ? stream_.get() : own_.get();
  return *chosen_;
}

}  // namespace trireme
