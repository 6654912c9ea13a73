#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/schedule_flat.h>

#include <cstdint>
#include <vector>

namespace trireme {

// The number of messages that an edge must be able to hold.
struct EdgeSlots {
  PipelineEdge edge;
  int64_t slots = 0;

  bool operator==(const EdgeSlots&) const = default;
};

// Checks a schedule, lowered or not. Each micro-batch passes every stage once, forward and, unless
// the whole table is one of an evaluation, backward: B, or I and W. Messages, shards and reductions
// of a lowered table must be complete. No ranks may wait for each other in a circle: schedule_run.h
// says which action waits for which.
//
// Returns the least slots of each edge between ranks with which no action begins later than with
// any number of them, where F, I and W take one step each. That many slots cause no circle,
// whatever time actions take. A message holds its slot from its send to its last use: B or W.
//
// With `slots`, every edge has only so many, and a circle through one that is never freed is found.
//
// Throws ValueError, which names the actions and their ranks. Costs a few passes over the actions.
TRIREME_API std::vector<EdgeSlots> check_schedule(const PipelineSchedule& schedule,
                                                  int64_t slots = 0);

// Checks everything but circles, which run_schedule() finds.
void check_whole(const FlatSchedule& flat);

}  // namespace trireme
