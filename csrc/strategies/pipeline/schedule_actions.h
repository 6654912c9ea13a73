#pragma once

#include <trireme/strategies/pipeline/schedule_costs.h>

#include <cstdint>
#include <vector>

namespace trireme {

// The numbers of ranks, stages on each, and micro-batches of a schedule that is made.
struct ScheduleShape {
  int32_t ranks = 1;
  int32_t local_stages = 1;
  int32_t micro_batches = 1;
};

// Each returns the actions of one rank. schedule_forms.h says which form is which.
RankActions looped_actions(const ScheduleShape& shape, int32_t rank);
// `hop` is how many forwards a rank is ahead of the next one; with `splits` backwards are I and W.
struct Interleaving {
  int32_t hop = 1;
  bool splits = false;
};
RankActions interleaved_actions(const ScheduleShape& shape, int32_t rank,
                                Interleaving interleaving);
RankActions zb_v_actions(const ScheduleShape& shape, int32_t rank);
RankActions dualpipe_v_actions(const ScheduleShape& shape, int32_t rank);

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
std::vector<RankActions> greedy_rows(const ScheduleShape& shape, const ScheduleCosts& costs,
                                     int64_t max_activations);  // 0: no limit

}  // namespace trireme
