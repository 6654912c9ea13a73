#include <trireme/comm/twin.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <numeric>
#include <vector>

namespace trireme {

std::shared_ptr<Communicator> twin_of(Communicator& communicator) {
  auto* owner = dynamic_cast<HasTwin*>(&communicator);
  return owner == nullptr ? nullptr : owner->twin();
}

// Not ProcessGroup::splitGroup(): that would split a backend once for each device type it stands
// for, under the same keys.
c10::intrusive_ptr<c10d::ProcessGroup> split_all(c10d::ProcessGroup& group,
                                                 const std::string& name) {
  std::vector<int> ranks(static_cast<size_t>(group.getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto parent = group.getBackend(c10::DeviceType::CPU);
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, group.getStore());
  auto made = c10::make_intrusive<c10d::ProcessGroup>(store, group.getRank(), group.getSize());
  const auto type = group.getBackendType();
  made->setBackend(c10::DeviceType::CPU, type,
                   parent->split(store, ranks, parent->getBackendOptions()));
  made->setDefaultBackend(type);
  return made;
}

}  // namespace trireme
