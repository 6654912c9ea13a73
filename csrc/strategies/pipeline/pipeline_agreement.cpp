#include <trireme/strategies/pipeline/pipeline_agreement.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_text.h>

#include <functional>
#include <string>

namespace trireme {
namespace {

// Returns what this rank cannot use, or nothing.
std::string complaint(const PipelineSchedule& schedule,
                      const std::vector<PipelineStageRequest>& stages, RankOf where) {
  if (schedule.ranks != where.world) {
    return c10::str("a schedule for ", schedule.ranks, " ranks, expected one for ", where.world);
  }
  std::vector<int64_t> given;
  for (const PipelineStageRequest& request : stages) given.push_back(request.stage);
  const std::vector<int64_t> expected = stages_of(schedule, where.rank);
  if (given != expected)
    return c10::str("stages ", given, ", expected stages ", expected, " by the schedule");
  return {};
}

// Describes what must be equal on all ranks of a pipeline, in one line.
std::string describe(const PipelineSchedule& schedule, const PipelineEngineOptions& options) {
  std::string text = c10::str(schedule.stages, " stages, ", schedule.micro_batches,
                              " micro-batches, scale_grads=", options.scale_grads, ", table ",
                              std::hash<std::string>()(to_csv(schedule, TableForm::kAsItIs)),
                              ", with replicas: ", options.replicas != nullptr);
  if (options.compression) text += ", compression " + to_string(*options.compression);
  for (const PipelineSkip& skip : options.skips)
    text += c10::str(", '", skip.name, "' from stage ", skip.from, " to stage ", skip.to);
  for (const TiedParameter& tied : options.tied) {
    text += ", tied";
    for (const auto& holder : tied.holders)
      text += c10::str(" '", holder.name, "' of stage ", holder.stage);
  }
  return text;
}

// Describes what must be equal in all replicas of a stage, a line for each tensor.
std::string describe(const PipelineStageRequest& stage) {
  std::string text;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, const char* what) {
    text += c10::str("\n'", name, "', ", what, " of stage ", stage.stage, ", as ",
                     tensor.scalar_type(), " ", tensor.sizes());
  };
  for (size_t i = 0; i < stage.parameters.names.size(); ++i)
    add(stage.parameters.names[i], stage.parameters.tensors[i], "a parameter");
  for (const auto& [name, tensor] : stage.buffers) add(name, tensor, "a buffer");
  return text;
}

// Returns the first difference between the texts of the ranks, or replicas; or nothing.
std::string difference(const std::vector<std::string>& texts, const std::string& who) {
  if (const auto complaint = first_complaint(texts))
    return c10::str(complaint->text, " (", who, " ", complaint->rank, " of ", texts.size(), ")");
  if (const auto differs = first_difference(texts))
    return c10::str(differs->first, " on ", who, " 0, and ", differs->other, " on ", who, " ",
                    differs->rank);
  return {};
}

}  // namespace

void agree_on_pipeline(const PipelineSchedule& schedule,
                       const std::vector<PipelineStageRequest>& stages,
                       const PipelineEngineOptions& options, Communicator& communicator) {
  std::string own = complaint(schedule, stages, communicator.rank_of());
  own = own.empty() ? describe(schedule, options) : as_complaint(own);
  std::string got = difference(gather_texts(own, communicator, communicator.device()), "rank");
  if (options.replicas) {
    for (const PipelineStageRequest& stage : stages) own += describe(stage);
    if (!got.empty()) own = as_complaint(got);
    Communicator& replicas = *options.replicas;
    const std::string of_stages =
        difference(gather_texts(own, replicas, replicas.device()), "replica");
    // Other ranks of the pipeline have other stages, whose replicas may differ: all hear of that.
    for (const std::string& text : gather_texts(of_stages, communicator, communicator.device()))
      if (got.empty()) got = text;
  }
  if (!got.empty())
    refuse_pipeline("got " + got,
                    "Give all ranks the same schedule and options, and their stages.");
}

}  // namespace trireme
