#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/schedule.h>

namespace trireme {

// Returns the table with everything that ranks do beside computing, as torch's pipelining 2.15 adds
// it; one that is lowered already is returned as it is. Bubbles are dropped.
//
//   SEND_F, SEND_B             behind what they send, where the other stage is on another rank
//   RECV_F, RECV_B             at the end of what the receiver's row holds when the send is placed:
//                              so all sends and receives are in one order, and none hangs
//   WAIT_SEND_F                behind the backward of its micro-batch, which proves that the peer
//                              had received it; without a backward at the end of the row
//   WAIT_SEND_B                at the end of the row
//   UNSHARD, RESHARD           so that a rank has the parameters of the next three stages it uses
//   REDUCE_GRAD, and its wait  behind the last backward of its stage
//
// Throws ValueError for a schedule that check_schedule() refuses, and for an overlap in which one
// action needs the result of another one.
TRIREME_API PipelineSchedule lower_schedule(const PipelineSchedule& schedule);

}  // namespace trireme
