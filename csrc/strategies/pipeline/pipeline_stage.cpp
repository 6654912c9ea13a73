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
  const int64_t rows = options.ranks || options.threads > 0
                           ? rows_of(options, ranks, count)
                           : count / options.stages_per_rank.value_or(1);
  const int64_t per_row = options.ranks ? count : count / std::max<int64_t>(rows, 1);
  if (!options.stages_per_rank && options.schedule.find_first_of(",\n") == std::string::npos &&
      per_row > 1)
    options.stages_per_rank = per_row;
  PipelineSchedule schedule = schedule_of(options, rows);
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
  for (int64_t row = 0; row < schedule.ranks; ++row) {
    if (options.ranks && row != ranks.communicator->rank()) continue;
    for (const int64_t stage : stages_of(schedule, row)) expected.push_back(stage);
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

// Calls the module of a stage.
class StagePipelineImpl::Function final : public StageFunction {
 public:
  Function(StagePipelineImpl& pipe, ModuleOfTensors module)
      : pipe_(pipe), module_(std::move(module)) {}

  PipelineValue forward(int64_t micro_batch, PipelineValue input) override {
    const MicroBatchScope scope(pipe_.batch_, micro_batch);
    std::optional<DeferredBatchNorms::Observer> sees;
    if (!is_recomputing()) sees.emplace(pipe_.batch_norms_);
    return {module_.forward(std::move(input.tensors))};
  }
  at::Tensor loss(int64_t micro_batch, const PipelineValue& output) override {
    const MicroBatchScope scope(pipe_.batch_, micro_batch);
    return (*pipe_.loss_)(output.tensors, batch_target());
  }

 private:
  StagePipelineImpl& pipe_;
  ModuleOfTensors module_;
};

StagePipelineImpl::StagePipelineImpl(std::vector<PipelineStage> stages,
                                     std::shared_ptr<Communicator> communicator,
                                     const PipelineOptions& options)
    : dim_(options.dim), chunks_(options.chunks) {
  const PipelineRanks ranks = ranks_of_copy(std::move(communicator), options);
  communicator_ = ranks.communicator;
  turn_ = std::make_unique<CallTurn>(options.ranks ? communicator_ : nullptr);
  std::sort(stages.begin(), stages.end(), [](const PipelineStage& a, const PipelineStage& b) {
    return a.options().stage < b.options().stage;
  });
  PipelineSchedule schedule;
  std::vector<PipelineStageRequest> requests;
  PipelineEngineOptions engine_options;
  engine_options.scale_grads = options.scale_grads;
  engine_options.replicas = ranks.replicas;
  const auto prepare = [&] {
    schedule = schedule_for(stages, options, ranks);
    std::vector<int64_t> bounds;
    for (int64_t stage = 0; stage <= schedule.stages; ++stage) bounds.push_back(stage);
    engine_options.skips = skips_of_stages(options.skips, bounds);
    for (const PipelineStage& stage : stages) {
      refuse_meetings_in_stages(*stage.module().module, options);
      requests.push_back(request_of(stage, options.deferred_batch_norm));
    }
  };
  refuse_together(run_together(prepare, *communicator_, communicator_->device()),
                  communicator_->rank_of());
  runner_ = make_runner(options, ranks, std::move(schedule), std::move(requests), engine_options);
}

PipelineStageRequest StagePipelineImpl::request_of(const PipelineStage& stage, bool defers) {
  const std::string name = "stage" + std::to_string(stage.options().stage);
  const std::shared_ptr<torch::nn::Module>& module = stage.module().module;
  register_module(name, module);
  if (defers) batch_norms_.add(module, name);
  PipelineStageRequest request;
  request.stage = stage.options().stage;
  request.name = stage.options().name;
  request.sends_gradients = sends_gradients(*module);
  request.function = std::make_shared<Function>(*this, stage.module());
  for (const auto& parameter : module->named_parameters()) {
    request.parameters.names.push_back(name + "." + parameter.key());
    request.parameters.tensors.push_back(parameter.value());
  }
  for (const auto& buffer : module->named_buffers())
    request.buffers.emplace_back(name + "." + buffer.key(), buffer.value());
  return request;
}

at::Tensor StagePipelineImpl::step(const PipelineTensors& inputs, const at::Tensor& target,
                                   const Loss& loss) {
  const CallTurn::Guard turn(*turn_, *runner_);
  begin(inputs, target);
  loss_ = &loss;
  at::Tensor found = batch_norms_.whole_batch([&] {
    return runner_->step(
        batch_.inputs, {.synchronizes = synchronizes_, .asks_to_divide_losses = batch_.has_graph});
  });
  batch_.tell_batch();
  return found;
}

at::Tensor StagePipelineImpl::eval_step(const PipelineTensors& inputs, const at::Tensor& target,
                                        const Loss& loss) {
  const CallTurn::Guard turn(*turn_, *runner_);
  begin(inputs, target);
  loss_ = &loss;
  return run_forwards(/*has_loss=*/true).loss;
}

std::vector<at::Tensor> StagePipelineImpl::eval_step(const PipelineTensors& inputs) {
  const CallTurn::Guard turn(*turn_, *runner_);
  begin(inputs, {});
  const std::vector<PipelineValue> values = run_forwards(/*has_loss=*/false).outputs;
  std::vector<at::Tensor> outputs;
  if (values.empty()) return outputs;
  for (size_t i = 0; i < values.front().tensors.size(); ++i) {
    std::vector<at::Tensor> parts;
    for (const PipelineValue& value : values) parts.push_back(value.tensors.at(i));
    outputs.push_back(at::cat(parts, dim_));
  }
  return outputs;
}

StagePipelineImpl::Loss StagePipelineImpl::of_one(const PipelineLoss& loss) {
  return [loss](const std::vector<at::Tensor>& outputs, const at::Tensor& target) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "got ", outputs.size(),
                      " outputs of the last stage, and a loss that takes one");
    return loss(outputs.front(), target);
  };
}

void StagePipelineImpl::begin(const PipelineTensors& inputs, const at::Tensor& target) {
  runner_->recover();
  batch_ = cut_batch({inputs.tensors(), target, dim_, chunks_}, *communicator_);
}

PipelineRunner::Evaluation StagePipelineImpl::run_forwards(bool has_loss) {
  PipelineRunner::Evaluation found =
      batch_norms_.whole_batch([&] { return runner_->eval_step(batch_.inputs, has_loss); });
  batch_.tell_batch();
  return found;
}

}  // namespace trireme
