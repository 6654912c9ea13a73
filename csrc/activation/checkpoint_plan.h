#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// The cost of one layer of a sequence: the bytes that autograd saves in its forward, the time of
// that forward in any unit, and the bytes kept if the layer is checkpointed: usually its inputs,
// which `bytes` includes if the layer saves them.
struct LayerCost {
  int64_t bytes = 0;
  double time = 0;
  int64_t kept = 0;
};

// The choice of the layers of a sequence that are checkpointed. It is a plain value.
//
// A layer that is not recomputed holds its bytes from its forward to its backward. A recomputed
// layer holds its inputs for that long, and its bytes in its backward only, while all layers in
// front of it still hold theirs.
struct CheckpointPlan {
  std::vector<bool> recompute;  // one per layer
  int64_t bytes = 0;            // the most held at any moment
  double extra_time = 0;        // time of the forwards that run twice

  bool operator==(const CheckpointPlan&) const = default;
};

// Returns the plan of a given choice: its bytes and extra time.
TRIREME_API CheckpointPlan plan_of(const std::vector<LayerCost>& layers,
                                   std::vector<bool> recompute);

// Returns the choice of the least extra time that holds at most `budget_bytes`. Costs at most
// layers * 4,096 steps: it is exact unless more combinations than that have to be considered, and
// then at most a thousandth of the budget remains unused.
//
// Throws ValueError for negative bytes or times, and for a budget that no choice fits; its text
// names the least budget that would do.
TRIREME_API CheckpointPlan checkpoint_plan(const std::vector<LayerCost>& layers,
                                           int64_t budget_bytes);

// Cuts `layers` layers into `segments` runs as torch.utils.checkpoint_sequential does: all but the
// last have layers / segments of them. Returns where each run begins, and `layers` at the end.
// Throws ValueError unless 1 <= segments <= layers.
TRIREME_API std::vector<int64_t> segment_bounds(int64_t layers, int64_t segments);

// Returns the number of segments that holds least if all layers are alike: the square root of
// `layers`, rounded up.
TRIREME_API int64_t square_root_segments(int64_t layers);

TRIREME_API std::string to_string(const CheckpointPlan& plan);

}  // namespace trireme
