#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/schedule.h>

#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// Returns a schedule of these rows. Stages, micro-batches and the rank of each stage are read from
// them. It is checked: schedule_check.h. Throws ValueError.
TRIREME_API PipelineSchedule schedule_from_rows(std::vector<RankActions> rows);

// Reads a table as torch's pipelining writes it: a line per rank, cells between commas, an empty
// cell for a bubble. A cell that is no action is refused with its row and column.
TRIREME_API PipelineSchedule schedule_from_csv(std::string_view text);

enum class TableForm {
  kComputeOnly,   // forwards, backwards and bubbles only
  kComputeComms,  // lowered, where the table is not yet
  kAsItIs,        // what the table holds, nothing added and nothing left out
};
// Reads "compute_only", "compute_comms". Throws ValueError, naming them.
TRIREME_API TableForm table_form(std::string_view name);

TRIREME_API std::string to_csv(const PipelineSchedule& schedule, TableForm form);

// Draws ranks over time steps, where F, I and W take one step each and B two; "-" continues an
// action, "." is a bubble:
//
//   step      0   1   2   3   4   5   6   7   8
//   rank 0  0F0 0F1   .   . 0B0   -   . 0B1   -
//   rank 1    . 1F0 1B0   - 1F1 1B1   -   .   .
TRIREME_API std::string to_string(const PipelineSchedule& schedule);

}  // namespace trireme
