#include <trireme/common/error.h>
#include <trireme/common/language.h>
#include <trireme/strategies/pipeline/engine.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/scoped_timer.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace trireme {

void PipelineEngine::run_action(const RowAction& action) {
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

void PipelineEngine::forward(const RowAction& action) {
  Stage& stage = *action.stage;
  const StageEdges::Message message{step_, stage.index(), action.micro_batch, action.label};
  StageReport& report = stage.report();
  StageInput input;
  if (!stage.is_first()) {
    const ScopedTimer waits(stage.waits().from_before);
    input = edges_->receive_onward(message);
  } else {
    input.value = take_input(action.micro_batch);
  }
  if (stage.has_skips()) {
    const ScopedTimer waits(report.waiting_ms["skips"]);
    skips_->receive_onward(message, input);
  }
  PipelineValue output;
  {
    const ScopedTimer computes(report.forward_ms);
    is_in_stage_ = true;
    output = stage.forward(action.micro_batch, std::move(input), action.is_recomputed);
    for (StageLoss& part : stage.take_parts_of_loss()) keep_part_of_loss(action, std::move(part));
    if (stage.is_last() && mode_.has_loss)
      keep_loss(action.micro_batch, stage.loss(action.micro_batch, output));
    if (mode_.trains && !mode_.is_pass) look_for_unlisted(action);
    is_in_stage_ = false;
  }
  if (!mode_.trains) done_with_input(stage);
  if (stage.has_skips()) {
    const ScopedTimer waits(report.waiting_ms["skips"]);
    skips_->send_onward(message, stage.take_stashed(), report);
  }
  if (!stage.is_last()) {
    const ScopedTimer waits(stage.waits().to_next);
    edges_->send_onward(message, output);
    count_sent(report, stage.index() + 1, output.tensors);
  } else if (!mode_.has_loss) {
    result_.outputs.resize(static_cast<size_t>(schedule_.micro_batches));
    result_.outputs[static_cast<size_t>(action.micro_batch)] = std::move(output);
  }
}

void PipelineEngine::recompute(const RowAction& action) {
  const ScopedTimer computes(action.stage->report().recompute_ms);
  is_in_stage_ = true;
  action.stage->recompute(action.micro_batch);
  is_in_stage_ = false;
}

void PipelineEngine::backward(const RowAction& action) {
  Stage& stage = *action.stage;
  const StageEdges::Message message{step_, stage.index(), action.micro_batch, action.label};
  StageReport& report = stage.report();
  std::vector<at::Tensor> gradients;
  if (stage.has_skips()) {
    const ScopedTimer waits(report.waiting_ms["skips"]);
    gradients = skips_->receive_back(message);
  }
  const bool wanted = stage.wants_gradients(action.micro_batch);
  if (wanted) {
    const ScopedTimer waits(stage.waits().from_next);
    const std::vector<at::Tensor> came =
        stage.is_last() ? pass_->gradients[static_cast<size_t>(action.micro_batch)]
                        : edges_->receive_back(message);
    gradients.insert(gradients.end(), came.begin(), came.end());
  }
  if (mode_.takes_losses) {
    const auto found = pass_->of_losses.find({stage.index(), action.micro_batch});
    if (found != pass_->of_losses.end())
      stage.take_loss_gradients(action.micro_batch, found->second);
  }
  const bool owes = stage.owes_gradients(action.micro_batch);
  const bool splits = action.kind == ActionKind::kBackwardInput;
  {
    const ScopedTimer computes(splits ? report.input_ms : report.backward_ms);
    is_in_stage_ = true;
    gradients = splits ? stage.backward_input(action.micro_batch, gradients)
                       : stage.backward(action.micro_batch, gradients, mode_.keep_graph);
    is_in_stage_ = false;
  }
  if (wanted && !stage.is_last()) edges_->done_with_gradients(stage.index());
  if (stage.has_skips()) {
    skips_->done_with_gradients(message);
    const size_t inputs = gradients.size() - std::min(gradients.size(), stage.popped());
    std::vector<at::Tensor> popped(std::make_move_iterator(gradients.begin() + inputs),
                                   std::make_move_iterator(gradients.end()));
    gradients.resize(inputs);
    popped.resize(stage.popped());
    const ScopedTimer waits(report.waiting_ms["skips"]);
    skips_->send_back(message, std::move(popped), report);
  }
  if (!splits) done_with_input(stage);
  if (!owes) return;
  const ScopedTimer waits(stage.waits().to_before);
  count_sent(report, stage.index() - 1, gradients);
  edges_->send_back(message, std::move(gradients));
}

void PipelineEngine::backward_weight(const RowAction& action) {
  Stage& stage = *action.stage;
  {
    const ScopedTimer computes(stage.report().weight_ms);
    is_in_stage_ = true;
    stage.backward_weight(action.micro_batch);
    is_in_stage_ = false;
  }
  done_with_input(stage);
}

void PipelineEngine::done_with_input(const Stage& stage) {
  if (!stage.is_first()) edges_->done_with_input(stage.index());
  skips_->done_with_input(stage.index());
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

void PipelineEngine::count_sent(StageReport& report, int64_t to,
                                const std::vector<at::Tensor>& tensors) const {
  if (edges_->is_local(report.stage, to)) return;
  ++report.messages;
  report.bytes += bytes_of(tensors);
}

void PipelineEngine::look_for_unlisted(const RowAction& action) {
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

void PipelineEngine::keep_part_of_loss(const RowAction& action, StageLoss part) {
  if (mode_.is_pass) {
    pass_losses_.push_back({action.stage->index(), action.micro_batch, std::move(part)});
  } else if (mode_.has_loss) {
    if (part.value.requires_grad()) ++parts_with_graph_;
    const at::Tensor value = part.value.detach().to(at::kDouble).reshape({});
    parts_of_loss_.push_back(value * part.weight);  // a double's memory is the layer's
  }
}

}  // namespace trireme
