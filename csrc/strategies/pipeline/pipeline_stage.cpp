#include <trireme/strategies/pipeline/pipeline_stage.h>

#include <trireme/comm/run_together.h>
#include <trireme/common/error.h>
#include <trireme/strategies/pipeline/refuse.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>

namespace trireme {
namespace {

// Makes the schedule; throws ValueError for stages that are not those of this rank.
PipelineSchedule schedule_for(const std::vector<PipelineStage>& stages, PipelineOptions options,
                              const PipelineRanks& ranks) {
  if (!options.balance.empty()) {
    refuse_pipeline(c10::str("got a balance of ", at::IntArrayRef(options.balance),
                             " beside stages that are cut"),
                    "Leave it out.");
  }
  const auto count = static_cast<int64_t>(stages.size());
  const int64_t all_ranks = options.ranks || options.threads > 0
                                ? schedule_ranks(options, ranks, count)
                                : count / options.stages_per_rank.value_or(1);
  const int64_t per_rank = options.ranks ? count : count / std::max<int64_t>(all_ranks, 1);
  if (!options.stages_per_rank && options.schedule.find_first_of(",\n") == std::string::npos &&
      per_rank > 1)
    options.stages_per_rank = per_rank;
  PipelineSchedule schedule = schedule_of(options, all_ranks);
  std::vector<int64_t> given;
  for (const PipelineStage& stage : stages) {
    given.push_back(stage.options().stage);
    if (stage.options().stages == schedule.stages) continue;
    refuse_pipeline("got stage " + std::to_string(stage.options().stage) + " of " +
                        std::to_string(stage.options().stages) + ", expected it of " +
                        std::to_string(schedule.stages) + ", as the schedule has",
                    "Correct PipelineStageOptions::stages, or take another schedule.");
  }
  std::vector<int64_t> expected;
  for (int64_t rank = 0; rank < schedule.ranks; ++rank) {
    if (options.ranks && rank != ranks.communicator->rank()) continue;
    for (const int64_t stage : stages_of(schedule, rank)) expected.push_back(stage);
  }
  std::sort(expected.begin(), expected.end());
  if (given != expected) {
    refuse_pipeline(c10::str("got stages ", at::IntArrayRef(given), ", expected ",
                             at::IntArrayRef(expected), " by the schedule"),
                    "Make those of this rank.");
  }
  return schedule;
}

// Throws on all ranks what one of them threw.
void refuse_together(const std::optional<RankFailure>& failed, RankOf where) {
  if (!failed) return;
  if (failed->own) std::rethrow_exception(failed->own);
  TORCH_CHECK_VALUE(false, error_text("pipeline",
                                      c10::str("got stages that rank ", failed->rank,
                                               " cannot use: ", failed->text),
                                      where, "Mend them there."));
}

}  // namespace

StagePipelineImpl::StagePipelineImpl(std::vector<PipelineStage> stages,
                                     std::shared_ptr<Communicator> communicator,
                                     const PipelineOptions& options)
    : PipelineModule(std::move(communicator), options) {
  std::sort(stages.begin(), stages.end(), [](const PipelineStage& a, const PipelineStage& b) {
    return a.options().stage < b.options().stage;
  });
  PipelineSchedule schedule;
  std::vector<PipelineStageRequest> requests;
  PipelineEngineOptions engine_options;
  const auto prepare = [&] {
    schedule = schedule_for(stages, options, ranks());
    std::vector<int64_t> bounds;
    for (int64_t stage = 0; stage <= schedule.stages; ++stage) bounds.push_back(stage);
    engine_options.skips = skips_of_stages(options.skips, bounds);
    for (const PipelineStage& stage : stages) {
      refuse_meetings_in_stages(*stage.module().module, options);
      requests.push_back(request_of(stage));
    }
  };
  const std::shared_ptr<Communicator>& own = ranks().communicator;
  refuse_together(run_together(prepare, *own, own->device()), own->rank_of());
  start(options, std::move(schedule), std::move(requests), std::move(engine_options));
}

PipelineStageRequest StagePipelineImpl::request_of(const PipelineStage& stage) {
  PipelineStageRequest request;
  request.stage = stage.options().stage;
  request.name = stage.options().name;
  add_layer(request, "stage" + std::to_string(request.stage), stage.module().module);
  request.function = function_of(stage.module().forward);
  return request;
}

}  // namespace trireme
