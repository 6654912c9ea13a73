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
// Of the fraction `optimizer` this rank's part of parameters, their gradients and so the state of
// the optimizer lie in CPU memory, where the optimizer steps them. Of `params` (at most
// `optimizer`) the device has no copy, and each gather brings one; of the others it keeps one of
// the part, in param_dtype, made once per step.
//
// Whole parameters are chosen, from the front of each unit. Copies of one Offload know of each
// other: give one to all units of a model, and each of them rounds so that the total comes nearest.
struct Offload {
  double optimizer = 1.0;
  double params = 0.0;
  bool pin_memory = true;  // page-locked, which copies that run beside the computation need
  // Tests set it: offloads also where the parameters are in CPU memory already, if they are
  // gathered.
  bool from_cpu = false;
  std::shared_ptr<OffloadOwed> owed = std::make_shared<OffloadOwed>();
};

// Throws ValueError unless 0 <= params <= optimizer <= 1.
TRIREME_API void check_offload(const Offload& offload, RankOf where);

struct OffloadPlanRequest {
  double optimizer = 1.0;
  double params = 0.0;
  const std::vector<int64_t>& parameter_bytes;  // bytes of a unit's, each on all ranks together
  OffloadOwed owed = {};                        // what the units before owe
};

// Says which of a unit's parameters lie where. It is a value: equal on all ranks.
struct OffloadPlan {
  std::vector<ShardOffload> parameters;
  OffloadOwed owed;  // what is owed, this unit included
};

TRIREME_API OffloadPlan make_offload_plan(const OffloadPlanRequest& request);

// Says in `request` which of a unit's parameters lie where. Does nothing where they are in CPU
// memory already, and rank 0 says so once. Throws what check_offload() throws.
TRIREME_API void settle_offload(const Offload& offload, ParamGroupRequest& request, RankOf where);

}  // namespace trireme
