#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/param/param_group.h>

#include <c10/core/Device.h>

#include <memory>

namespace trireme {

struct FsdpOptions;

// The ranks that share the parameters of a unit, and those that have the same shards.
struct UnitRanks {
  std::shared_ptr<Communicator> sharers;
  std::shared_ptr<Communicator> replicates_with;  // null if all ranks share the parameters
  // The neighbours among which the unit is resharded where it gathers; null: all sharers.
  std::shared_ptr<Communicator> reshards_with;
};

// Reads shard_among and the options of resharding, whose result afterwards stands in
// reshard_after_forward. Throws ValueError for numbers of ranks that do not fit and for options
// that contradict each other; NotImplementedError for communicators that cannot be cut. Collective.
UnitRanks ranks_of_unit(FsdpOptions& options, c10::Device device);

// Makes the group of one unit's parameters, whose specs must be equal on all ranks. Throws what
// ParamGroup throws, and ValueError on all ranks for specs that differ. Collective.
TRIREME_API std::shared_ptr<ParamGroup> make_param_group(ParamGroupRequest request);

}  // namespace trireme
