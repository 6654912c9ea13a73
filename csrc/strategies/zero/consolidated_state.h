#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/memory/shard_plan.h>
#include <trireme/strategies/zero/optimizer_archive.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// A parameter and who owns what of it.
struct ShardedParameter {
  ParameterInfo info;
  std::vector<ShardRange> ranges;  // one per rank
  ShardPlacement placement = ShardPlacement::kDim0;

  // Rank 0 of one without elements.
  TRIREME_API bool is_owned_by(int64_t rank) const;
  // The sizes of the shard that a rank holds.
  TRIREME_API std::vector<int64_t> sizes_on(int64_t rank) const;
};

TRIREME_API std::vector<ShardedParameter> sharded_parameters(
    const std::vector<ParameterInfo>& infos, const ShardPlan& plan);

// States of whole parameters on rank `to`, on CPU, from what each rank has of those it owns
// (`own`, by parameter); nothing elsewhere. What is shaped like its shard is put together, what is
// not is taken from the first owner. Collective.
//
// Tensors are broadcast as they are, some 32 MiB at a time; what they are called is told by text.
// So `to` has all of the state afterwards and the others never more than their own and one batch.
// Throws TypeError on all ranks for states that are no tensors, numbers, truth values or texts.
TRIREME_API std::vector<ArchivedValues> gather_states(
    const std::vector<ArchivedValues>& own, const std::vector<ShardedParameter>& parameters,
    Communicator& communicator, int64_t to);

// Returns what a rank takes of the state of a whole parameter: copies of tensors, on the
// parameter's device but for 0-dim ones, which stay where they are. Throws ValueError where a
// parameter that is cut for several ranks has another shape than a tensor of its state.
TRIREME_API ArchivedValues own_part(const ArchivedValues& whole, const ShardedParameter& parameter,
                                    RankOf where);

}  // namespace trireme
