#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/schedule.h>
#include <trireme/strategies/pipeline/schedule_costs.h>

#include <cstdint>
#include <optional>
#include <string>

namespace trireme {

// A request for one of the built-in forms.
//
//   name               stages per rank    what it is
//   gpipe              1                  all forwards, then all backwards
//   1f1b               1                  one forward, one backward in turn
//   interleaved-1f1b   any number, 2      the same with stages r, r + ranks, ... on rank r
//   looped-bfs         any number, 2      as gpipe, one stage of a rank after the other
//   zb-h1              any number, 1      as (interleaved-)1f1b; I instead of B, W fills bubbles
//   zb-v               2                  stages r and 2 * ranks - 1 - r on rank r, I and W
//   dualpipe-v         2                  as zb-v, with overlaps of F and B
//   zb-auto            any number, 1      greedy over costs, under a limit of live activations
//
// Where another form with the same stages on each rank (the first five; B as I and W) keeps to the
// limit and is shorter under these costs, zb-auto takes its order: it is never the slower one.
//
// Where torch.distributed.pipelining has a form of that name, the order of every rank's actions is
// torch's. One thing differs: looped-bfs runs the backwards of a stage in the order of
// micro-batches, as all others do, so that gradients are summed in one order under every schedule.
//
// Numbers that torch refuses work, too:
//   - fewer micro-batches than ranks: the forwards before the first backward are at most all;
//   - interleaved-1f1b and zb-h1 work in micro_batches / ranks rounds, at least one. Where these do
//     not divide, the first rounds have one micro-batch more than the last;
//   - dualpipe-v with fewer than 2 * ranks micro-batches is the one for 2 * ranks, without those
//     that are too many (zb-v does so in torch, too).
struct PipelineScheduleRequest {
  std::string name;
  int64_t ranks = 1;
  int64_t micro_batches = 1;
  std::optional<int64_t> stages_per_rank = {};
  // Read by zb-auto only, and refused elsewhere. Without a limit a rank runs as far ahead as its
  // inputs come.
  std::optional<ScheduleCosts> costs = {};
  std::optional<int64_t> max_activations = {};
};

// Returns a schedule that is checked. Throws ValueError for an unknown name, listing those that
// there are, and for numbers that the form cannot have.
TRIREME_API PipelineSchedule pipeline_schedule(const PipelineScheduleRequest& request);

}  // namespace trireme
