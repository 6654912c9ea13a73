#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>

#include <set>
#include <string>
#include <vector>

namespace trireme {

// [Note: redistributing without files]
//
// Before and after a change of strategy, of ranks or of stages, a rank has other parts of the same
// tensors. What it needs afterwards it gets from a rank that holds it: each element from exactly
// one, in messages of a few megabytes, and no rank ever has more than its parts of before and
// after.
//
//   tensors of ranks -> redistribute_plan (who sends what) -> part_exchange (messages)
//
// The ranks are those of before and those of after: one that leaves needs nothing, one that comes
// holds nothing.

// This rank's parts, before and after. Each name is there once in each list.
struct RedistributeRequest {
  std::vector<CheckpointTensor> held = {};    // equal on all ranks that hold the same element
  std::vector<CheckpointTensor> needed = {};  // written in place
  // Tensors of which ranks may hold different values (buffers): the lowest holder's count.
  std::set<std::string> of_lowest = {};
};

// Writes the needed parts of all ranks. A part may lie in the memory of a held one if each element
// has the same place in both (a shard that is a view of the whole). Values are written without
// autograd, and cast where a part has another dtype than the `dtype` of its tensor, which is what
// travels.
//
// Collective: two small gathers, then the messages of the plan, over the communicator's send(),
// recv() and broadcast(). Throws ValueError on all ranks, before anything is written, for an
// element that no rank holds, naming tensor and range, for a tensor of other sizes or dtype on
// another rank, and for parts that overlap otherwise; c10::DistBackendError if a rank is gone or
// comes too late: parts may be half written then.
TRIREME_API void redistribute(const RedistributeRequest& request, const CheckpointRanks& ranks);

}  // namespace trireme
