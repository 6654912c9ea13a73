#include <trireme/comm/c10d/split_group.h>

#include <trireme/comm/c10d/engine_options.h>
#include <trireme/comm/c10d/group_values.h>
#include <trireme/common/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <typeinfo>

namespace trireme {
namespace {

// Copies the options, since an engine writes into the options that it splits by: which ranks the
// part has, what it is split from. Without a copy it would take itself for the part.
template <typename Options>
c10::intrusive_ptr<Options> copy_of(const c10::intrusive_ptr<Options>& options,
                                    const std::string& engine, RankOf where) {
  if (!options) return options;
  if constexpr (requires { options->clone(); }) {
    auto copy = options->clone();
    // A class without a clone() of its own would lose members in the copy. torch then shares, too.
    return typeid(*copy) == typeid(*options) ? copy : options;
  } else {  // torch 2.11
    if (typeid(*options) == typeid(Options)) return c10::make_intrusive<Options>(*options);
    if (engine == "gloo") return copy_gloo_options(options);
    return engine == "nccl" ? copy_nccl_options(options, where) : options;
  }
}

// Returns how many parts of this name a group has been split into, and counts one more. A part that
// is made again, by another communicator over the group, meets under keys of its own: in the Store
// are still the addresses of the one before. All ranks of a part make it as often, so they count
// alike.
int64_t count_part(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name) {
  static GroupValues<std::map<std::string, int64_t>> made;
  return made.with(group, [&](auto& parts) { return parts[name]++; });
}

}  // namespace

// Does not use ProcessGroup::splitGroup(): that would split a backend once for each device type it
// stands for, under the same keys.
c10::intrusive_ptr<c10d::ProcessGroup> split_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& whole, const std::vector<int>& ranks,
    const std::string& name, std::optional<c10::DeviceType> only) {
  c10d::ProcessGroup& group = *whole;
  if (!group.hasBackends()) return {};
  const std::vector<c10::Device> devices =
      only ? std::vector<c10::Device>{c10::Device(*only)} : group.getDeviceTypes();
  for (const c10::Device device : devices)
    if (!group.getBackend(device.type())->supportsSplitting()) return {};
  const std::string part = name + " of ranks " + c10::str(ranks);
  const size_t hash = std::hash<std::string>()(part);
  const std::string keys = c10::str("trireme/", name, "/", hash, "/", count_part(whole, part));
  const auto store = c10::make_intrusive<c10d::PrefixStore>(keys, group.getStore());
  const auto place = std::find(ranks.begin(), ranks.end(), group.getRank()) - ranks.begin();
  auto made = c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(place),
                                                      static_cast<int>(ranks.size()));
  std::map<const c10d::Backend*, c10::intrusive_ptr<c10d::Backend>> splits;
  for (const c10::Device device : devices) {
    const auto parent = group.getBackend(device.type());
    const std::string engine = parent->getBackendName();
    c10::intrusive_ptr<c10d::Backend>& backend = splits[parent.get()];
    if (!backend)
      backend = parent->split(
          c10::make_intrusive<c10d::PrefixStore>(engine, store), ranks,
          copy_of(parent->getBackendOptions(), engine, {group.getRank(), group.getSize()}));
    made->setBackend(device.type(), c10d::ProcessGroup::strToBackendType(engine), backend);
  }
  made->setDefaultBackend(
      only ? c10d::ProcessGroup::strToBackendType(group.getBackend(*only)->getBackendName())
           : group.getBackendType());
  return made;
}

}  // namespace trireme
