#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/action.h>

#include <cstdint>
#include <vector>

namespace trireme {

// The actions of one rank, in their order: a row of the table.
using RankActions = std::vector<PipelineAction>;

// The actions of every rank, in their order: one row per rank. It is a plain value, which must be
// equal on all ranks, since messages follow from it.
//
// A table holds either no messages, which then follow from its forwards and backwards, or all of
// them: schedule_lowering.h.
struct PipelineSchedule {
  int64_t ranks = 0;
  int64_t stages = 0;
  int64_t micro_batches = 0;
  std::vector<int64_t> stage_rank = {};  // one per stage
  std::vector<RankActions> rows = {};    // one per rank

  TRIREME_API bool operator==(const PipelineSchedule& other) const;
};

// Returns the stages that a rank has, in their order.
TRIREME_API std::vector<int64_t> stages_of(const PipelineSchedule& schedule, int64_t rank);

// Returns whether a table says where messages are sent and received.
TRIREME_API bool has_messages(const PipelineSchedule& schedule);

// A stage that sends, and the stage before or behind it that receives.
struct PipelineEdge {
  int64_t from = 0;
  int64_t to = 0;

  bool operator==(const PipelineEdge&) const = default;
};

}  // namespace trireme
