#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/param/param_group.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace trireme {

// Bytes by which the units so far have offloaded less than their fractions; below 0: more.
struct OffloadOwed {
  double optimizer = 0;
  double params = 0;
};

// A fraction of a model in CPU memory while another device computes, by bytes.
//
// For the fraction `optimizer`, this rank's part of parameters, their gradients and so the state of
// the optimizer lie in CPU memory, where the optimizer steps them. For `params` (at most
// `optimizer`) the device has no copy, and each gather brings one; for the rest it keeps a copy of
// the part, in param_dtype, made once per step.
//
// Whole parameters are chosen, from the front of each unit. Copies of one Offload know of each
// other: give one to all units of a model, and each of them rounds so that the total comes nearest.
struct Offload {
  double optimizer = 1.0;
  double params = 0.0;
  bool pin_memory = true;  // page-locked, which copies that run beside the computation need
  // Whether parameters that are in CPU memory already are offloaded, too, if they are gathered: for
  // tests.
  bool from_cpu = false;
  std::shared_ptr<OffloadOwed> owed = std::make_shared<OffloadOwed>();
};

// Throws ValueError unless 0 <= params <= optimizer <= 1.
TRIREME_API void check_offload(const Offload& offload, RankOf where);

struct OffloadPlanRequest {
  double optimizer = 1.0;
  double params = 0.0;
  const std::vector<int64_t>& parameter_bytes;  // bytes of each parameter, on all ranks together
  OffloadOwed owed = {};                        // what the units before owe
};

// Where each of a unit's parameters lies. It is a plain value: equal on all ranks.
struct OffloadPlan {
  std::vector<ShardOffload> parameters;
  OffloadOwed owed;  // what is owed, this unit included
};

TRIREME_API OffloadPlan make_offload_plan(const OffloadPlanRequest& request);

// Sets in `request` where each of a unit's parameters lies. Does nothing where they are in CPU
// memory already, and rank 0 warns of that once. Throws what check_offload() throws.
TRIREME_API void place_offloaded(const Offload& offload, ParamGroupRequest& request, RankOf where);

}  // namespace trireme
