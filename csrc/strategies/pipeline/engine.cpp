#include <trireme/strategies/pipeline/engine.h>

#include <trireme/strategies/pipeline/engine/row.h>

#include <utility>

namespace trireme {

PipelineEngine::PipelineEngine(PipelineSchedule schedule, std::vector<PipelineStageRequest> stages,
                               std::shared_ptr<Communicator> communicator,
                               const PipelineEngineOptions& options)
    : row_(std::make_unique<Row>(std::move(schedule), std::move(stages), std::move(communicator),
                                 options)) {}

PipelineEngine::~PipelineEngine() = default;

void PipelineEngine::recover() { row_->recover(); }

at::Tensor PipelineEngine::step(std::vector<PipelineValue> inputs, const StepMode& mode) {
  return row_
      ->run(std::move(inputs), {.trains = true,
                                .synchronizes = mode.synchronizes,
                                .divides_losses = mode.divides_losses,
                                .asks_to_divide_losses = mode.asks_to_divide_losses,
                                .loss_scale = mode.loss_scale})
      .loss;
}

PipelineEngine::Evaluation PipelineEngine::eval_step(std::vector<PipelineValue> inputs,
                                                     bool has_loss) {
  return row_->run(std::move(inputs), {.has_loss = has_loss, .backwards = false});
}

PassOutputs PipelineEngine::forward_pass(std::vector<PipelineValue> inputs,
                                         const PassOptions& options) {
  return row_->forward_pass(std::move(inputs), options);
}

void PipelineEngine::backward_pass(KeptRow& kept, const PassBackward& backward) {
  row_->backward_pass(kept, backward);
}

bool PipelineEngine::has_strategies() const { return row_->has_strategies(); }

bool PipelineEngine::divides_losses() const { return row_->divides_losses(); }

void PipelineEngine::set_parameters(int64_t stage, NamedParameters parameters,
                                    std::vector<std::shared_ptr<HeldBackwards>> strategies) {
  row_->set_parameters(stage, std::move(parameters), std::move(strategies));
}

std::vector<at::Tensor> PipelineEngine::later_copies() const { return row_->later_copies(); }

const PipelineSchedule& PipelineEngine::schedule() const { return row_->schedule(); }

const std::string& PipelineEngine::raised_in() const { return row_->raised_in(); }

PipelineReport PipelineEngine::last_step() const { return row_->report(); }

}  // namespace trireme
