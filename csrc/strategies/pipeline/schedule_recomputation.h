#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/schedule.h>

#include <cstdint>
#include <set>
#include <string_view>
#include <utility>

namespace trireme {

// The micro-batches that a stage computes once more before their backward, so that it keeps only
// their inputs meanwhile.
enum class Recomputation : uint8_t {
  kNever,
  kExceptLast,  // all but the last one, whose backward is never far (torchgpipe's rule)
  kAlways,
  // Micro-batches whose backward does not directly follow their forward: for others nothing would
  // be freed.
  kAuto,
};
// Reads "never", "except_last", "always", "auto". Throws ValueError, naming them.
TRIREME_API Recomputation recomputation(std::string_view name);

// Returns the schedule with an R in front of the backwards of these micro-batches. R waits for its
// forward only, so that it runs while a gradient is on its way: in a bubble, where there is one,
// and as late as it can, since it takes memory. Throws ValueError for a schedule that has an R
// already, unless `which` is kNever.
TRIREME_API PipelineSchedule with_recomputation(PipelineSchedule schedule, Recomputation which);

// Returns stage and micro-batch of each R of a rank.
TRIREME_API std::set<std::pair<int32_t, int32_t>> recomputed_in(const RankActions& actions);

}  // namespace trireme
