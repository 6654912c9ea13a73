#pragma once

#include <trireme/strategies/pipeline/schedule_flat.h>
#include <trireme/strategies/pipeline/stage_costs.h>

#include <cstdint>
#include <vector>

namespace trireme {

// The begin and the end of each action of a FlatSchedule.
struct ScheduleTimes {
  std::vector<double> begin;
  std::vector<double> end;
};

// [Note: what an action waits for]
//
// It waits for the action before it of its rank, and for these:
//
//   F              F of the stage before: its SEND_F, where that is on another rank
//   R              F
//   B, I           F, and R where there is one; B or I of the next stage, or its SEND_B
//   W              I
//   SEND_F         F. With c slots: the last use of the message that was sent c sends before
//   SEND_B         B or I. Slots as for SEND_F
//   WAIT_SEND_*    the send, and the peer's RECV
//   RECV_*         nothing: it is posted. The user of the message comes after it
//
// The parts of an overlap wait for what any of them waits for. A message is used by F and by the
// backwards of its micro-batch, up to W.

// Runs all ranks against each other, each action as early as it can; `slots` is the number of
// messages that an edge holds, 0 for any number. Costs one pass over the actions.
//
// Throws ValueError where that does not end: the actions of a circle wait for each other, and the
// text lists them with their ranks.
ScheduleTimes run_schedule(const FlatSchedule& flat, const ScheduleCosts& costs, int64_t slots = 0);

}  // namespace trireme
