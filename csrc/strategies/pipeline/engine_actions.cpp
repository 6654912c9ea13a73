#include <trireme/common/error.h>
#include <trireme/common/language.h>
#include <trireme/strategies/pipeline/engine.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/scoped_timer.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <utility>

namespace trireme {

void PipelineEngine::run_action(const ComputeAction& action) {
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) range.before(action.trace);
  if (action.kind == ActionKind::kForward) {
    forward(action);
    return;
  }
  if (action.kind == ActionKind::kRecompute) {
    recompute(action);
    return;
  }
  const bool completes = action.completes && mode_.synchronizes;
  if (completes) gradients_->before_last_backward(action.place);
  if (action.kind == ActionKind::kBackwardWeight) {
    backward_weight(action);
  } else {
    backward(action);
  }
  if (completes) gradients_->after_last_backward(action.place);
}

void PipelineEngine::forward(const ComputeAction& action) {
  Stage& stage = *action.stage;
  const EdgeMessage message{step_, stage, action.micro_batch, action.label};
  StageInput input = edges_->receive_onward(message);
  if (stage.is_first()) input.value = take_input(action.micro_batch);
  PipelineValue output;
  {
    const ScopedTimer computes(stage.report().forward_ms);
    is_in_stage_ = true;
    output = stage.forward(action.micro_batch, std::move(input), action.is_recomputed);
    for (StageLoss& part : stage.take_parts_of_loss()) keep_part_of_loss(action, std::move(part));
    if (stage.is_last() && mode_.has_loss)
      keep_loss(action.micro_batch, stage.loss(action.micro_batch, output));
    if (mode_.trains && !mode_.is_pass) look_for_unlisted(action);
    is_in_stage_ = false;
  }
  if (!mode_.trains) edges_->done_with_input(stage);
  if (!stage.is_last()) {
    edges_->send_onward(message, std::move(output));
  } else if (!mode_.has_loss) {
    result_.outputs.resize(static_cast<size_t>(schedule_.micro_batches));
    result_.outputs[static_cast<size_t>(action.micro_batch)] = std::move(output);
  }
}

void PipelineEngine::recompute(const ComputeAction& action) {
  const ScopedTimer computes(action.stage->report().recompute_ms);
  is_in_stage_ = true;
  action.stage->recompute(action.micro_batch);
  is_in_stage_ = false;
}

void PipelineEngine::backward(const ComputeAction& action) {
  Stage& stage = *action.stage;
  const EdgeMessage message{step_, stage, action.micro_batch, action.label};
  StageReport& report = stage.report();
  std::vector<at::Tensor> gradients = edges_->receive_back(message);
  if (stage.is_last() && stage.wants_gradients(action.micro_batch)) {
    const auto& came = pass_->gradients[static_cast<size_t>(action.micro_batch)];
    gradients.insert(gradients.end(), came.begin(), came.end());
  }
  if (mode_.takes_losses) {
    const auto found = pass_->of_losses.find({stage.index(), action.micro_batch});
    if (found != pass_->of_losses.end())
      stage.take_loss_gradients(action.micro_batch, found->second);
  }
  const bool splits = action.kind == ActionKind::kBackwardInput;
  {
    const ScopedTimer computes(splits ? report.input_ms : report.backward_ms);
    is_in_stage_ = true;
    gradients = splits ? stage.backward_input(action.micro_batch, gradients)
                       : stage.backward(action.micro_batch, gradients, mode_.keep_graph);
    is_in_stage_ = false;
  }
  edges_->done_with_gradients(message);
  if (!splits) edges_->done_with_input(stage);
  edges_->send_back(message, std::move(gradients));
}

void PipelineEngine::backward_weight(const ComputeAction& action) {
  Stage& stage = *action.stage;
  {
    const ScopedTimer computes(stage.report().weight_ms);
    is_in_stage_ = true;
    stage.backward_weight(action.micro_batch);
    is_in_stage_ = false;
  }
  edges_->done_with_input(stage);
}

PipelineValue PipelineEngine::take_input(int64_t micro_batch) {
  TORCH_CHECK_VALUE(
      inputs_.size() == static_cast<size_t>(schedule_.micro_batches),
      error_text("pipeline",
                 "got " + std::to_string(inputs_.size()) + " inputs, expected " +
                     std::to_string(schedule_.micro_batches) + ", one per micro-batch",
                 where_, "Cut the batch into as many."));
  return std::move(inputs_[static_cast<size_t>(micro_batch)]);
}

void PipelineEngine::look_for_unlisted(const ComputeAction& action) {
  const bool divides = !divides_losses_ && options_.scale_grads && schedule_.micro_batches > 1;
  if (!divides && mode_.loss_scale == 1) return;
  const auto graph = action.stage->graph_of(action.micro_batch);
  if (!gradients_->unlisted().add(graph, divides && options_.scale_unlisted)) return;
  refuse_pipeline(c10::str("got a backward of ", action.stage->text(),
                           " that sends gradients away, to a table or another process, before ",
                           divides ? "the step divides them by the number of micro-batches"
                                   : "a GradScaler divides them by its scale"),
                  divides ? in_language({"Derive the layer from SendsGradients.",
                                         "Let the layer have sends_gradients = True."})
                          : "Leave the scaler out.");
}

void PipelineEngine::keep_loss(int64_t micro_batch, const at::Tensor& loss) {
  losses_.resize(static_cast<size_t>(schedule_.micro_batches));
  if (!loss.requires_grad()) ++losses_without_graph_;
  losses_[static_cast<size_t>(micro_batch)] = loss.detach();
}

void PipelineEngine::keep_part_of_loss(const ComputeAction& action, StageLoss part) {
  if (mode_.is_pass) {
    pass_losses_.push_back({action.stage->index(), action.micro_batch, std::move(part)});
  } else if (mode_.has_loss) {
    if (part.value.requires_grad()) ++parts_with_graph_;
    const at::Tensor value = part.value.detach().to(at::kDouble).reshape({});
    parts_of_loss_.push_back(value * part.weight);  // a double's memory is the layer's
  }
}

}  // namespace trireme
