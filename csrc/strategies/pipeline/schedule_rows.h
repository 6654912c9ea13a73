#pragma once

#include <trireme/strategies/pipeline/schedule_costs.h>

#include <cstdint>
#include <vector>

namespace trireme {

// The numbers of ranks, stages on each, and micro-batches for which a row is made.
struct ScheduleShape {
  int32_t ranks = 1;
  int32_t local_stages = 1;
  int32_t micro_batches = 1;
};

// Each returns the row of one rank. schedule_forms.h says which form is which.
PipelineRow looped_row(const ScheduleShape& shape, int32_t rank);
// `hop` is how many forwards a rank is ahead of the next one; with `splits` backwards are I and W.
struct Interleaving {
  int32_t hop = 1;
  bool splits = false;
};
PipelineRow interleaved_row(const ScheduleShape& shape, int32_t rank, Interleaving interleaving);
PipelineRow zb_v_row(const ScheduleShape& shape, int32_t rank);
PipelineRow dualpipe_v_row(const ScheduleShape& shape, int32_t rank);

// [Note: the greedy schedule]
//
// Time goes on action by action: the rank whose next action can begin earliest takes it. It prefers
// a backward to a forward that could begin at the same time, and a later stage to an earlier one. W
// waits for a gap. How much of W must fit into a gap for it to go there (all, half, anything) is
// tried out; the shortest schedule wins.
//
// A limit of live activations holds for each rank. A forward may begin only while enough of the
// limit remains for the oldest micro-batch to pass all stages of the rank, so that no rank fills up
// with micro-batches that cannot come back. Hence the limit is at least the number of its stages.
std::vector<PipelineRow> greedy_rows(const ScheduleShape& shape, const ScheduleCosts& costs,
                                     int64_t max_activations);  // 0: no limit

}  // namespace trireme
