#pragma once

#include <trireme/grad/held_backwards.h>
#include <trireme/param/param_group.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace trireme {

// Holds back the backwards of a unit. Its reducer is made in the first forward, which is too late
// to be told of a pipeline's first backwards: so it is the unit's flags that say when to
// synchronize.
class UnitHold final : public HeldBackwards {
 public:
  explicit UnitHold(std::shared_ptr<ParamGroup> group) : group_(std::move(group)) {}

  void hold(bool held) override {
    bool& flag = group_->flags().synchronizes;
    if (held == before_.has_value()) return;
    if (held) {
      before_ = std::exchange(flag, false);
    } else {
      flag = *std::exchange(before_, std::nullopt);
    }
  }
  void prepare_for_backward() override { group_->flags().synchronizes = before_.value_or(true); }
  // A backward that reaches the output of the outermost unit synchronizes all of them.
  void synchronize_unreached() override {}
  void announce_failure(const std::string& text) noexcept override {
    const std::shared_ptr<Communicator> gatherers[] = {group_->gathers_with(),
                                                       group_->reshards_with()};
    group_->communicator()->announce_failure(text);
    for (const auto& ranks : gatherers)
      if (ranks && ranks != group_->communicator()) ranks->announce_failure(text);
  }

 private:
  std::shared_ptr<ParamGroup> group_;
  std::optional<bool> before_ = {};  // the flag, while it is held
};

}  // namespace trireme
