#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/schedule.h>
#include <trireme/strategies/pipeline/stage_costs.h>

#include <cstdint>
#include <vector>

namespace trireme {

// An action that computes, with its begin and end. The parts of an overlap are listed one by one.
struct TimedAction {
  int64_t rank = 0;
  PipelineAction action;
  double begin = 0;
  double end = 0;
};

// The figures below are those of a run in which every action begins as early as it can: after the
// one before it in its row and after the actions it needs. All throw ValueError for a schedule that
// check_schedule() refuses, and for invalid costs.

// Returns rank after rank, each in the order of its actions.
TRIREME_API std::vector<TimedAction> timeline(const PipelineSchedule& schedule,
                                              const ScheduleCosts& costs = {});
// Returns the time from the first action to the end of the last.
TRIREME_API double makespan(const PipelineSchedule& schedule, const ScheduleCosts& costs = {});
// Returns the share of the makespan in which a rank computes nothing, mean over ranks.
TRIREME_API double bubble(const PipelineSchedule& schedule, const ScheduleCosts& costs = {});

// Returns the most micro-batches of which a rank keeps all that autograd saves at once: from F, or
// from R where there is one, to B or W. Each stage of the rank counts for itself.
TRIREME_API int64_t peak_activations(const PipelineSchedule& schedule, int64_t rank);
// Returns the same for a rank of a schedule that is known to be whole.
TRIREME_API int64_t most_live(const RankActions& actions);

// Returns the most messages of an edge that were sent and that the receiver still needs
// (schedule_check.h). Throws ValueError for stages that send each other nothing.
TRIREME_API int64_t peak_messages(const PipelineSchedule& schedule, PipelineEdge edge);

}  // namespace trireme
