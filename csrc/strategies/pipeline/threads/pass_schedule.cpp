#include <trireme/strategies/pipeline/threads/pass_schedule.h>

#include <trireme/strategies/pipeline/schedule_text.h>

#include <utility>

namespace trireme {

PipelineSchedule pass_schedule(const PipelineSchedule& like, int64_t micro_batches) {
  std::vector<RankActions> rows(static_cast<size_t>(like.ranks));
  const auto add_all = [&](int64_t stage, ActionKind kind) {
    const auto rank = static_cast<size_t>(like.stage_rank[static_cast<size_t>(stage)]);
    for (int64_t i = 0; i < micro_batches; ++i)
      rows[rank].push_back({static_cast<int32_t>(stage), kind, static_cast<int32_t>(i)});
  };
  for (int64_t stage = 0; stage < like.stages; ++stage) add_all(stage, ActionKind::kForward);
  for (int64_t stage = like.stages; stage-- > 0;) add_all(stage, ActionKind::kBackward);
  return schedule_from_rows(std::move(rows));
}

}  // namespace trireme
