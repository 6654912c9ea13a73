#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/memory/shard_plan.h>
#include <trireme/strategies/zero/optimizer_archive.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// A parameter and the ranges that ranks own of it.
struct ShardedParameter {
  ParameterInfo info;
  std::vector<ShardRange> ranges;  // one per rank
  ShardPlacement placement = ShardPlacement::kDim0;

  // Returns whether a rank owns a part; rank 0 owns a parameter without elements.
  TRIREME_API bool is_owned_by(int64_t rank) const;
  // Returns the sizes of the shard that a rank holds.
  TRIREME_API std::vector<int64_t> sizes_on(int64_t rank) const;
};

TRIREME_API std::vector<ShardedParameter> sharded_parameters(
    const std::vector<ParameterInfo>& infos, const ShardPlan& plan);

// Returns the states of whole parameters on rank `to`, on CPU, from those that each rank has of its
// shards (`own`, by parameter); nothing elsewhere. Tensors shaped like their shard are put
// together, other values are taken from the first owner. Collective.
//
// Tensors are broadcast as they are, some 32 MiB at a time; their names travel as text. So `to` has
// all of the state afterwards and the others never more than their own and one batch. Throws
// TypeError on all ranks for states that are no tensors, numbers, truth values or texts.
TRIREME_API std::vector<ArchivedValues> gather_states(
    const std::vector<ArchivedValues>& own, const std::vector<ShardedParameter>& parameters,
    Communicator& communicator, int64_t to);

// Returns a rank's part of the state of a whole parameter: copies of tensors, on the parameter's
// device but for 0-dim ones, which stay where they are. Throws ValueError where a parameter that is
// cut for several ranks has another shape than a tensor of its state.
TRIREME_API ArchivedValues own_part(const ArchivedValues& whole, const ShardedParameter& parameter,
                                    RankOf where);

}  // namespace trireme
