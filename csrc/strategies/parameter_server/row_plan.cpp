#include <trireme/strategies/parameter_server/row_plan.h>

#include <trireme/kernels/optimizer_step.h>
#include <trireme/strategies/parameter_server/table_plan.h>

#include <algorithm>

namespace trireme::ps {
namespace {

constexpr int64_t kPageBytes = 4096;

int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

RowPlan make_row_plan(const RowPlanRequest& request) {
  RowPlan plan;
  plan.dim = request.dim;
  plan.dtype = request.dtype;
  const auto item = static_cast<int64_t>(c10::elementSize(request.dtype));
  const auto state_item =
      static_cast<int64_t>(c10::elementSize(optimizer_state_dtype(request.dtype)));
  plan.values_at = sizeof(RowRecord);
  plan.states_at = round_up(plan.values_at + request.dim * item, state_item);
  plan.state_bytes = request.state_numel * state_item;
  plan.record_bytes = in_lines(plan.states_at + request.states * plan.state_bytes);

  const int64_t in_memory = std::max<int64_t>(request.memory_bytes / plan.record_bytes, 1);
  // A worker that dies while it makes a row leaves a record that no lookup finds.
  plan.most_rows = std::min(request.rows ? *request.rows + request.workers : in_memory, in_memory);
  // An index is at most half full.
  while (plan.levels == 0 || RowPlan::slots_of(plan.levels - 1) < 2 * plan.most_rows) ++plan.levels;

  plan.lines_at = sizeof(RowsHeader);
  plan.index_at = in_lines(plan.lines_at + request.workers * static_cast<int64_t>(sizeof(RowLine)));
  plan.records_at = round_up(plan.level_at(plan.levels), kPageBytes);
  plan.pushes_at = round_up(plan.record_at(plan.most_rows), kPageBytes);
  plan.push_bytes = request.deposits ? request.memory_bytes : 0;
  plan.bytes = plan.pushes_at + plan.push_bytes;
  return plan;
}

}  // namespace trireme::ps
