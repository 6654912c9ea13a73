#pragma once

#include <trireme/common/export.h>
#include <trireme/param/param_group.h>
#include <trireme/sync/deferred_sync.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace trireme {

// Holds back the backwards of a unit. Its reducer is made in the first forward, which is too late
// for a pipeline's first backwards: so the unit's flags say when to synchronize. The reducer is
// told of the last backward, which comes behind forwards.
class TRIREME_API UnitHold final : public DeferredSync {
 public:
  explicit UnitHold(std::shared_ptr<ParamGroup> group) : group_(std::move(group)) {}

  void hold(bool held) override;
  void prepare_for_backward() override;
  void synchronize_unreached() override;
  void announce_failure(const std::string& text) noexcept override;

 private:
  std::shared_ptr<DeferredSync> reducer() const;  // null before the first forward

  std::shared_ptr<ParamGroup> group_;
  std::optional<bool> before_ = {};  // the flag, while it is held
};

}  // namespace trireme
