#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/schedule.h>

#include <cstdint>

namespace trireme {

// Returns the table of a pass: all forwards, then all backwards in one piece, a stage after the
// other, with the stages of `like` on the same ranks, and any number of micro-batches.
TRIREME_API PipelineSchedule pass_schedule(const PipelineSchedule& like, int64_t micro_batches);

}  // namespace trireme
