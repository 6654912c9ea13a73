#include <trireme/param/step_gate.h>

#include <trireme/comm/host_counters.h>
#include <trireme/common/trace.h>

#include <string>
#include <utility>

namespace trireme {

StepGate::StepGate(std::shared_ptr<HostStore> store, std::shared_ptr<Communicator> communicator,
                   PartsByRank parts)
    : store_(std::move(store)), communicator_(std::move(communicator)), parts_(std::move(parts)) {}

void StepGate::begin_reading() {
  if (!is_writing_) return;
  TRIREME_TRACE("step_gate.begin_reading");
  if (store_) store_->publish_version(version_);
  const std::string name = "step gate: written, parameters of version " + std::to_string(version_);
  if (!parts_.empty()) {
    communicator_->host()->all_gather_in_host(parts_, name).wait();
  } else if (Host* host = store_ ? communicator_->host() : nullptr) {
    wake_peers(host->group());
    const auto written = [this](int64_t rank) -> const auto& { return store_->version_of(rank); };
    wait_for_peers(host->group(), written, version_, name);
  }
  is_writing_ = false;
}

FactorRange StepGate::begin_writing(const FactorRange& factor) {
  if (is_writing_) return {};
  TRIREME_TRACE("step_gate.begin_writing");
  FactorRange of_all;
  if (store_) store_->publish_release(version_, factor);
  if (Host* host = store_ ? communicator_->host() : nullptr) {
    wake_peers(host->group());
    const auto released = [this](int64_t rank) -> const auto& { return store_->release_of(rank); };
    const std::string name =
        "step gate: before writing, readers of version " + std::to_string(version_);
    wait_for_peers(host->group(), released, version_, name);
    // No rank publishes the next factor before this rank has come to begin_reading().
    for (int64_t rank = 0; rank < store_->where().world; ++rank)
      of_all = of_all & store_->factor_of(rank);
  }
  ++version_;
  is_writing_ = true;
  return of_all;
}

}  // namespace trireme
