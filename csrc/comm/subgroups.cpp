#include <trireme/comm/subgroups.h>

#include <trireme/comm/engine_options.h>
#include <trireme/common/error.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <map>
#include <typeinfo>

namespace trireme {
namespace {

// Ranks first, first + step, ...
struct Members {
  int64_t first = 0;
  int64_t count = 0;
  int64_t step = 1;
};

std::shared_ptr<Communicator> split(Communicator& communicator, const Members& members,
                                    const std::string& name) {
  auto* owner = dynamic_cast<CanSplit*>(&communicator);
  if (owner == nullptr) return nullptr;
  std::vector<int> ranks;
  for (int64_t i = 0; i < members.count; ++i)
    ranks.push_back(static_cast<int>(members.first + i * members.step));
  return owner->split(ranks, name);
}

void check_factor(RankOf where, int64_t count) {
  TORCH_CHECK_VALUE(count >= 1 && where.world % count == 0,
                    error_text("comm", "got groups of " + std::to_string(count) + " ranks", where,
                               "Pass a factor of " + std::to_string(where.world) + "."));
}

// An engine gives its own options away and writes into those that it splits by: which ranks the
// part has, what it is split from. So it gets a copy, or it would take itself for the part.
template <typename Options>
c10::intrusive_ptr<Options> copy_of(const c10::intrusive_ptr<Options>& options,
                                    const std::string& engine, RankOf where) {
  if (!options) return options;
  if constexpr (requires { options->clone(); }) {
    auto copy = options->clone();
    // One that has not been told how keeps less than it has. torch then shares, too.
    return typeid(*copy) == typeid(*options) ? copy : options;
  } else {  // torch 2.11
    if (typeid(*options) == typeid(Options)) return c10::make_intrusive<Options>(*options);
    if (engine == "gloo") return copy_gloo_options(options);
    return engine == "nccl" ? copy_nccl_options(options, where) : options;
  }
}

}  // namespace

std::shared_ptr<Communicator> twin_of(Communicator& communicator) {
  return split(communicator, {0, communicator.world(), 1}, "twin");
}

std::shared_ptr<Communicator> neighbours_of(Communicator& communicator, int64_t count) {
  const RankOf where = communicator.rank_of();
  check_factor(where, count);
  return split(communicator, {where.rank / count * count, count, 1},
               "neighbours/" + std::to_string(count));
}

std::shared_ptr<Communicator> counterparts_of(Communicator& communicator, int64_t count) {
  const RankOf where = communicator.rank_of();
  check_factor(where, count);
  return split(communicator, {where.rank % count, where.world / count, count},
               "counterparts/" + std::to_string(count));
}

// Not ProcessGroup::splitGroup(): that would split a backend once for each device type it stands
// for, under the same keys.
c10::intrusive_ptr<c10d::ProcessGroup> split_group(c10d::ProcessGroup& group,
                                                   const std::vector<int>& ranks,
                                                   const std::string& name) {
  if (!group.hasBackends()) return {};
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  for (const c10::Device device : devices)
    if (!group.getBackend(device.type())->supportsSplitting()) return {};
  const std::string keys = "trireme/" + name + "/" + std::to_string(ranks.front());
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
  made->setDefaultBackend(group.getBackendType());
  return made;
}

}  // namespace trireme
