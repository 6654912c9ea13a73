#include <trireme/strategies/pipeline/schedule.h>

#include <algorithm>

namespace trireme {

bool PipelineSchedule::operator==(const PipelineSchedule& other) const {
  return ranks == other.ranks && stages == other.stages && micro_batches == other.micro_batches &&
         stage_rank == other.stage_rank && rows == other.rows;
}

std::vector<int64_t> stages_of(const PipelineSchedule& schedule, int64_t rank) {
  std::vector<int64_t> stages;
  for (int64_t stage = 0; stage < schedule.stages; ++stage)
    if (schedule.stage_rank[static_cast<size_t>(stage)] == rank) stages.push_back(stage);
  return stages;
}

bool has_messages(const PipelineSchedule& schedule) {
  return std::any_of(schedule.rows.begin(), schedule.rows.end(), [](const RankActions& row) {
    return std::any_of(row.begin(), row.end(),
                       [](const PipelineAction& action) { return is_message(action.kind); });
  });
}

}  // namespace trireme
