#include <trireme/strategies/parameter_server/table_plan.h>

#include <trireme/kernels/optimizer_step.h>
#include <trireme/memory/shard_plan.h>
#include <trireme/strategies/parameter_server/table_memory.h>

#include <c10/core/ScalarType.h>

#include <algorithm>

namespace trireme::ps {
namespace {

// Places a part behind the others, and returns its offset.
int64_t place(int64_t& end, int64_t bytes) {
  const int64_t offset = end;
  end += in_lines(bytes);
  return offset;
}

// Places the parts that all kinds of tables have.
void place_lines(TablePlan& plan, int64_t lines, int64_t workers) {
  place(plan.bytes, sizeof(TableHeader));
  plan.blocks_at = place(plan.bytes, lines * static_cast<int64_t>(sizeof(BlockLine)));
  plan.mark_bytes = in_lines(static_cast<int64_t>(sizeof(WorkerMarks)) +
                             2 * plan.tensors * static_cast<int64_t>(sizeof(uint64_t)));
  plan.marks_at = place(plan.bytes, workers * plan.mark_bytes);
}

}  // namespace

TablePlan make_table_plan(const TablePlanRequest& request) {
  TablePlan plan;
  plan.tensors = static_cast<int64_t>(request.tensors.size());
  for (int64_t tensor = 0; tensor < plan.tensors; ++tensor) {
    const int64_t numel = request.tensors[static_cast<size_t>(tensor)].numel;
    for (int64_t begin = 0; begin < numel; begin += kBlockNumel)
      plan.blocks.push_back({tensor, begin, std::min(kBlockNumel, numel - begin)});
  }
  plan.lines = static_cast<int64_t>(plan.blocks.size());
  place_lines(plan, plan.lines, request.workers);
  plan.states_begin = plan.bytes;
  for (int64_t state = 0; state < request.states; ++state) {
    for (const ParameterInfo& info : request.tensors) {
      const auto item = static_cast<int64_t>(c10::elementSize(optimizer_state_dtype(info.dtype)));
      plan.state_at.push_back(place(plan.bytes, info.numel * item));
    }
  }
  plan.states_end = plan.bytes;
  if (request.deposits) {
    const StoreLayout half = make_store_layout(request.tensors);
    plan.in_half = half.offsets;
    plan.half_bytes = half.bytes;
    plan.deposits_at = place(plan.bytes, request.workers * 2 * half.bytes);
  }
  return plan;
}

TablePlan make_sparse_table_plan(int64_t shares, int64_t workers) {
  TablePlan plan;
  plan.lines = shares;
  place_lines(plan, shares + 1, workers);
  plan.states_begin = plan.states_end = plan.bytes;
  return plan;
}

std::string to_string(const TablePlan& plan, const std::vector<ParameterInfo>& tensors) {
  std::string text;
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    const TableBlock& block = plan.blocks[i];
    text += "block " + std::to_string(i) + ": '" + tensors[static_cast<size_t>(block.tensor)].name +
            "'[" + std::to_string(block.begin) + ", " + std::to_string(block.begin + block.numel) +
            ")\n";
  }
  return text;
}

}  // namespace trireme::ps
