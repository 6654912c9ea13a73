#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// What one layer of a sequence takes: the bytes that autograd saves in its forward, the time of
// that forward in any unit, and the bytes that remain where the layer is checkpointed: its inputs,
// as a rule, which are among the former where the layer saves them.
struct LayerCost {
  int64_t bytes = 0;
  double time = 0;
  int64_t kept = 0;
};

// Says which layers of a sequence are checkpointed. It is a value.
//
// A layer that is not recomputed holds its bytes from its forward to its backward. One that is
// recomputed holds its inputs for so long, and its bytes in its backward only, where all layers in
// front of it still hold theirs.
struct CheckpointPlan {
  std::vector<bool> recompute;  // one per layer
  int64_t bytes = 0;            // the most that are held at any moment
  double extra_time = 0;        // time of the forwards that run twice

  bool operator==(const CheckpointPlan&) const = default;
};

// Returns what a given choice holds and costs.
TRIREME_API CheckpointPlan plan_of(const std::vector<LayerCost>& layers,
                                   std::vector<bool> recompute);

// Returns the choice of the least extra time that holds at most `budget_bytes`. Costs at most
// layers * 4,096 steps: it is exact unless more combinations than that are worth a look, and then
// at most a thousandth of the budget remains unused.
//
// Throws ValueError for negative bytes or times, and for a budget that no choice fits; its text
// names the least budget that would do.
TRIREME_API CheckpointPlan checkpoint_plan(const std::vector<LayerCost>& layers,
                                           int64_t budget_bytes);

// Cuts `layers` layers into `segments` runs as torch.utils.checkpoint_sequential does: all but the
// last have layers / segments of them. Returns where each run begins, and `layers` at the end.
// Throws ValueError unless 1 <= segments <= layers.
TRIREME_API std::vector<int64_t> segment_bounds(int64_t layers, int64_t segments);

// Returns how many segments hold least where all layers are alike: the root of their number,
// rounded up.
TRIREME_API int64_t square_root_segments(int64_t layers);

TRIREME_API std::string to_string(const CheckpointPlan& plan);

}  // namespace trireme
