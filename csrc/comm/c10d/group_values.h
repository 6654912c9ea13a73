#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace trireme {

// One value for each group of this process, as long as the group lives. What ranks have agreed on
// over a group is kept here and not in a communicator: those over one group end when the last one
// who uses them does, which may be earlier on one rank than on another. Thread-safe.
template <typename Value>
class GroupValues {
 public:
  // Returns what `use` makes of the value of a group, which begins as Value().
  template <typename Use>
  auto with(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Use& use) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const Entry& one) { return one.group.expired(); });
    const WeakGroup weak(group);
    auto found =
        std::find_if(all_.begin(), all_.end(), [&](const Entry& one) { return one.group == weak; });
    if (found == all_.end()) found = all_.insert(found, {weak, Value()});
    return use(found->value);
  }

 private:
  using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  struct Entry {
    WeakGroup group;
    Value value;
  };
  std::mutex mutex_;
  std::vector<Entry> all_;
};

}  // namespace trireme
