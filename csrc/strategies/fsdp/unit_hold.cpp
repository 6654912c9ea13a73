#include <trireme/strategies/fsdp/unit_hold.h>

namespace trireme {

// Returns the DeferredSync of a unit's reducer, which the unsharded parameters name. Several units
// may have it in common.
std::shared_ptr<DeferredSync> UnitHold::reducer() const {
  if (group_->leaves().empty()) return nullptr;
  std::shared_ptr<DeferredSync> found = deferred_sync_of(group_->leaves().front());
  return found.get() == this ? nullptr : found;
}

void UnitHold::hold(bool held) {
  bool& flag = group_->flags().synchronizes;
  if (held == before_.has_value()) return;
  if (held) {
    before_ = std::exchange(flag, false);
  } else {
    flag = *std::exchange(before_, std::nullopt);
    if (const auto reducer = this->reducer()) reducer->hold(false);
  }
}

void UnitHold::prepare_for_backward() {
  bool& flag = group_->flags().synchronizes;
  flag = before_.value_or(true);
  const auto reducer = this->reducer();
  if (!flag || !reducer) return;
  reducer->hold(true);  // so that it is prepared only where the caller averages at all
  reducer->prepare_for_backward();
}

void UnitHold::synchronize_unreached() {
  if (!group_->flags().synchronizes) return;
  if (const auto reducer = this->reducer()) reducer->synchronize_unreached();
  // A backward that was reached has done these two at its end.
  group_->memory().forget_pieces();
  if (group_->flags().reshard_after_backward) group_->show_sharded();
}

void UnitHold::announce_failure(const std::string& text) noexcept {
  const std::shared_ptr<Communicator> gatherers[] = {group_->gathers_with(),
                                                     group_->reshards_with()};
  group_->communicator()->announce_failure(text);
  for (const auto& ranks : gatherers)
    if (ranks && ranks != group_->communicator()) ranks->announce_failure(text);
}

}  // namespace trireme
