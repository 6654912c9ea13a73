#include <trireme/strategies/pipeline/engine.h>

#include <trireme/comm/group_health.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/interruption.h>
#include <trireme/strategies/pipeline/pipeline_agreement.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/scoped_timer.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace trireme {
namespace {

// One rank's share of the loss, summed over ranks: the loss of the last stage, and parts of layers.
struct LossMessage {
  double value = 0;
  double dtype = 0;
  double has_loss = 0;
  double without_graph = 0;  // micro-batches
  double parts_with_graph = 0;
};

}  // namespace

PipelineEngine::PipelineEngine(PipelineSchedule schedule, std::vector<PipelineStageRequest> stages,
                               std::shared_ptr<Communicator> communicator,
                               const PipelineEngineOptions& options)
    : schedule_(std::move(schedule)),
      communicator_(std::move(communicator)),
      where_(communicator_->rank_of()),
      options_(options) {
  agree_on_pipeline(schedule_, stages, options_, *communicator_);
  edges_ = std::make_unique<StageEdges>(schedule_, options_.skips, *communicator_);
  gradients_ = std::make_unique<RankGradients>(schedule_, stages, *communicator_, options_);
  for (PipelineStageRequest& request : stages) {
    StageSkips skips = edges_->skips_of(request.stage);
    sends_gradients_ = sends_gradients_ || request.sends_gradients;
    stages_.push_back(std::make_unique<Stage>(std::move(request), schedule_, std::move(skips)));
  }
  const RankActions& own = schedule_.rows[static_cast<size_t>(where_.rank)];
  const auto recomputed = recomputed_in(own);
  for (const PipelineAction& action : own) {
    for_each_part(action, [&](const PipelineAction& part) {
      add(part, recomputed.count({part.stage, part.micro_batch}) > 0);
    });
  }
  gradients_->set_order(mark_last_actions());
}

PipelineReport PipelineEngine::last_step() const {
  PipelineReport report = report_;
  report.computed_bubble = bubble(schedule_, measured_costs());
  return report;
}

void PipelineEngine::set_parameters(int64_t stage, NamedParameters parameters,
                                    std::vector<std::shared_ptr<DeferredSync>> strategies) {
  for (size_t i = 0; i < stages_.size(); ++i) {
    if (stages_[i]->index() == stage) {
      gradients_->set_parameters(i, std::move(parameters), std::move(strategies));
      return;
    }
  }
  refuse_pipeline("got parameters of stage " + std::to_string(stage) + ", which rank " +
                      std::to_string(where_.rank) + " does not hold",
                  "Give those of a stage of this rank.");
}

void PipelineEngine::recover() {
  communicator_->recover();
  gradients_->recover();
  if (const auto failure = communicator_->failure()) {
    C10_THROW_ERROR(DistBackendError,
                    error_text("pipeline", "got a step after the group had failed: " + *failure,
                               where_, std::string(kRebuildGroup) + "."));
  }
  if (!std::exchange(has_failed_, false)) return;
  edges_->forget_before(step_ + 1);
  gradients_->forget_before(step_ + 1);
}

at::Tensor PipelineEngine::step(std::vector<PipelineValue> inputs, const StepMode& mode) {
  return run(std::move(inputs), {.trains = true,
                                 .synchronizes = mode.synchronizes,
                                 .divides_losses = mode.divides_losses,
                                 .asks_to_divide_losses = mode.asks_to_divide_losses,
                                 .loss_scale = mode.loss_scale})
      .loss;
}

PipelineEngine::Evaluation PipelineEngine::eval_step(std::vector<PipelineValue> inputs,
                                                     bool has_loss) {
  return run(std::move(inputs), {.has_loss = has_loss, .backwards = false});
}

PipelineRunner::Evaluation PipelineEngine::run(std::vector<PipelineValue> inputs,
                                               const Mode& mode) {
  recover();
  Evaluation found = run_or_abort(std::move(inputs), mode);  // all have finished
  TORCH_CHECK(!lacks_graph_,
              error_text("pipeline",
                         "element 0 of tensors does not require grad and does not have a grad_fn: "
                         "got a loss without a graph, so that the step has trained nothing",
                         where_, "Let it depend on a parameter that requires a gradient."));
  return found;
}

PipelineRunner::Evaluation PipelineEngine::run_or_abort(std::vector<PipelineValue> inputs,
                                                        const Mode& mode) {
  try {
    return run_batch(std::move(inputs), mode);
  } catch (const Interruption& interruption) {
    abort_step(interruption.reason);
    throw;
  } catch (...) {
    const std::string text = abort_step(text_of(std::current_exception()));
    if (!is_in_stage_ || options_.on_threads) throw;
    TORCH_CHECK(false, text);
  }
}

void PipelineEngine::add(const PipelineAction& action, bool is_recomputed) {
  if (!is_compute(action.kind)) return;
  for (size_t place = 0; place < stages_.size(); ++place) {
    Stage& stage = *stages_[place];
    if (stage.index() != action.stage) continue;
    actions_.push_back({action.kind, &stage, place, action.micro_batch, in_words(action),
                        "trireme::pipeline::" + to_string(action), is_recomputed});
  }
}

bool PipelineEngine::find_divided_losses(const Mode& mode) {
  const bool exist =
      gradients_->find_strategies() || sends_gradients_ || mode.asks_to_divide_losses;
  if (mode.divides_losses) return *mode.divides_losses;
  const at::Tensor any = at::full({1}, exist ? 1.0 : 0.0, at::kDouble).to(communicator_->device());
  communicator_->all_reduce({any}, ReduceOp::kMax, "strategies of step " + std::to_string(step_))
      .wait();
  return any.item<double>() > 0;
}

std::vector<size_t> PipelineEngine::mark_last_actions() {
  std::vector<size_t> order;
  for (auto action = actions_.rbegin(); action != actions_.rend(); ++action) {
    const bool accumulates =
        action->kind == ActionKind::kBackward || action->kind == ActionKind::kBackwardWeight;
    if (!accumulates || std::count(order.begin(), order.end(), action->place) > 0) continue;
    action->completes = true;
    order.insert(order.begin(), action->place);
  }
  return order;
}

PipelineRunner::Evaluation PipelineEngine::run_batch(std::vector<PipelineValue> inputs,
                                                     const Mode& mode) {
  const auto started = ScopedTimer::Clock::now();
  begin(std::move(inputs), mode);
  // Strategies average during backwards, and gradients that are sent away are out of reach
  // afterwards: then losses are divided, in place of gradients.
  divides_losses_ = mode.trains && !mode.is_pass && find_divided_losses(mode);
  const bool is_divided = divides_losses_ && options_.scale_grads;
  const double divisor = is_divided ? static_cast<double>(schedule_.micro_batches) : 1;
  for (const auto& stage : stages_)
    stage->begin_step({mode.trains, mode.is_pass, mode.takes_losses, mode.loss_scale / divisor});
  const bool adds_up = mode.trains && !mode.is_pass;
  if (adds_up) gradients_->begin_step({step_, mode.synchronizes, !divides_losses_});
  run_actions();
  if (adds_up) gradients_->finish_sums();
  if (!mode.is_pass) result_.loss = finish();
  if (adds_up) gradients_->end_step();
  communicator_->show_step(step_, /*is_done=*/true);
  make_report(ScopedTimer::since(started));
  return std::exchange(result_, {});
}

void PipelineEngine::begin(std::vector<PipelineValue> inputs, const Mode& mode) {
  ++step_;
  raised_in_.clear();
  current_ = nullptr;
  is_in_stage_ = false;
  communicator_->show_step(step_, /*is_done=*/false);
  inputs_ = std::move(inputs);
  result_ = {};
  losses_.clear();
  parts_of_loss_.clear();
  losses_without_graph_ = parts_with_graph_ = 0;
  lacks_graph_ = false;
  pass_losses_.clear();
  mode_ = mode;
}

void PipelineEngine::run_actions() {
  const at::AutoGradMode grad_mode(mode_.trains);
  for (const ComputeAction& action : actions_) {
    const bool is_wanted = action.kind == ActionKind::kForward ? mode_.forwards : mode_.backwards;
    if (!is_wanted) continue;
    current_ = &action;
    run_action(action);
  }
  current_ = nullptr;
  inputs_.clear();
}

PassOutputs PipelineEngine::forward_pass(std::vector<PipelineValue> inputs,
                                         const PassOptions& options) {
  PassOutputs found;
  found.outputs = run(std::move(inputs), {.trains = options.records,
                                          .has_loss = false,
                                          .is_pass = true,
                                          .takes_losses = options.takes_losses,
                                          .backwards = false})
                      .outputs;
  found.losses = std::exchange(pass_losses_, {});
  if (!options.records) return found;
  found.kept = std::make_shared<KeptGraphs>();
  for (const auto& stage : stages_) found.kept->live.push_back(stage->take_live());
  found.kept->due = edges_->due();
  return found;
}

void PipelineEngine::backward_pass(KeptGraphs& kept, const PassBackward& backward) {
  for (size_t i = 0; i < stages_.size(); ++i) stages_[i]->put_live(std::move(kept.live[i]));
  edges_->set_due(kept.due);
  pass_ = &backward;
  // `kept` gets the graphs back, also after a failure.
  const auto take_back = [&] {
    pass_ = nullptr;
    for (size_t i = 0; i < stages_.size(); ++i) kept.live[i] = stages_[i]->take_live();
  };
  try {
    run({}, {.trains = true,
             .has_loss = false,
             .is_pass = true,
             .takes_losses = !backward.of_losses.empty(),
             .forwards = false,
             .keep_graph = backward.keep_graph});
  } catch (...) {
    take_back();
    throw;
  }
  take_back();
}

at::Tensor PipelineEngine::finish() {
  LossMessage message;
  if (!losses_.empty()) {
    at::Tensor loss = losses_.front().clone();
    for (size_t i = 1; i < losses_.size(); ++i) loss.add_(losses_[i]);
    if (options_.scale_grads) loss.div_(schedule_.micro_batches);
    message = {loss.item<double>(), static_cast<double>(loss.scalar_type()), 1};
  }
  if (!parts_of_loss_.empty()) {
    at::Tensor sum = at::stack(parts_of_loss_).sum();
    if (options_.scale_grads) sum.div_(schedule_.micro_batches);
    message.value += sum.item<double>();
  }
  message.without_graph = static_cast<double>(losses_without_graph_);
  message.parts_with_graph = static_cast<double>(parts_with_graph_);
  at::Tensor sum = at::tensor({message.value, message.dtype, message.has_loss,
                               message.without_graph, message.parts_with_graph},
                              at::kDouble)
                       .to(communicator_->device());
  communicator_->all_reduce({sum}, ReduceOp::kSum, "loss of step " + std::to_string(step_)).wait();
  sum = sum.cpu();
  const auto* values = sum.const_data_ptr<double>();
  const auto micro_batches = static_cast<double>(schedule_.micro_batches);
  lacks_graph_ = mode_.trains && values[3] == micro_batches && values[4] == 0;
  if (values[2] == 0) return {};
  return at::scalar_tensor(values[0],
                           at::TensorOptions().dtype(static_cast<at::ScalarType>(values[1])));
}

void PipelineEngine::make_report(double step_ms) {
  report_.step = step_;
  report_.step_ms = step_ms;
  report_.stages.clear();
  double computing = 0;
  for (const auto& stage : stages_) {
    const StageReport report = stage->finished_report();
    computing += report.forward_ms + report.recompute_ms + report.backward_ms + report.input_ms +
                 report.weight_ms;
    report_.stages.push_back(report);
  }
  const SentCodes sent = gradients_->sent();
  report_.sent_bytes = sent.bytes;
  report_.encode_ms = sent.encode_ms;
  report_.bubble = step_ms > 0 ? std::max(0.0, 1 - computing / step_ms) : 0;
}

ScheduleCosts PipelineEngine::measured_costs() const {
  StageCosts sum{0, 0, 0};
  for (const StageReport& report : report_.stages) {
    sum.forward += report.forward_ms;
    sum.input += report.input_ms + report.backward_ms / 2;
    sum.weight += report.weight_ms + report.backward_ms / 2;
  }
  return {{sum}};
}

std::string PipelineEngine::abort_step(const std::string& why) noexcept {
  std::string text = why;
  try {
    std::string who = "a rank gave up at the end of step ";
    if (current_ != nullptr) {
      const std::string& name = current_->stage->name();
      const std::string place = current_->label + (name.empty() ? "" : " (" + name + ")");
      if (is_in_stage_) raised_in_ = place;
      who = place + (is_in_stage_ ? " raised in step " : " gave up in step ");
    }
    text = error_text("pipeline", who + std::to_string(step_) + ": " + why, where_,
                      "See the error of that rank; the next step begins anew");
    communicator_->announce_failure(text);
    communicator_->show_step(step_, /*is_done=*/true);
  } catch (...) {  // out of memory: the peers see their deadline instead
  }
  has_failed_ = true;
  for (const auto& stage : stages_) stage->abandon();
  edges_->abandon();
  gradients_->abandon(text);
  losses_.clear();
  parts_of_loss_.clear();
  pass_losses_.clear();
  result_ = {};
  inputs_.clear();
  return text;
}

}  // namespace trireme
