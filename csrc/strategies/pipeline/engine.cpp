#include <trireme/strategies/pipeline/engine.h>

#include <trireme/comm/group_health.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/interruption.h>
#include <trireme/strategies/pipeline/gradients/row_gradients.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/row_agreement.h>
#include <trireme/strategies/pipeline/schedule_costs.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/skip_edges.h>
#include <trireme/strategies/pipeline/stage.h>
#include <trireme/strategies/pipeline/stage_edges.h>
#include <trireme/strategies/pipeline/timed.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

namespace trireme {
namespace {

// Carries the loss to all ranks: what the rank of the last stage says, and zeros of the others.
struct LossMessage {
  double value = 0;
  double dtype = 0;
  double has_loss = 0;
};

}  // namespace

class PipelineEngine::Row {
 public:
  Row(PipelineSchedule schedule, std::vector<PipelineStageRequest> stages,
      std::shared_ptr<Communicator> communicator, const PipelineEngineOptions& options)
      : schedule_(std::move(schedule)),
        communicator_(std::move(communicator)),
        where_(communicator_->rank_of()),
        options_(options) {
    agree_on_row(schedule_, stages, options_, *communicator_);
    edges_ = std::make_unique<StageEdges>(schedule_, *communicator_);
    skips_ = std::make_unique<SkipEdges>(schedule_, options_.skips, *communicator_);
    gradients_ = std::make_unique<RowGradients>(schedule_, stages, *communicator_, options_);
    for (PipelineStageRequest& request : stages) {
      StageSkips skips = skips_->skips_of(request.stage);
      stages_.push_back(std::make_unique<Stage>(std::move(request), schedule_, std::move(skips)));
    }
    const PipelineRow& row = schedule_.rows[static_cast<size_t>(where_.rank)];
    const auto recomputed = recomputed_in(row);
    for (const PipelineAction& action : row) {
      for_each_part(action, [&](const PipelineAction& part) {
        add(part, recomputed.count({part.stage, part.micro_batch}) > 0);
      });
    }
    gradients_->set_order(mark_last_actions());
  }

  const PipelineSchedule& schedule() const { return schedule_; }
  const std::string& raised_in() const { return raised_in_; }

  PipelineReport report() const {
    PipelineReport report = report_;
    report.computed_bubble = bubble(schedule_, measured_costs());
    return report;
  }

  void set_parameters(int64_t stage, NamedParameters parameters,
                      std::vector<std::shared_ptr<HeldBackwards>> strategies) {
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

  std::vector<at::Tensor> later_copies() const { return gradients_->later_copies(); }
  bool has_strategies() const { return gradients_->has_strategies(); }

  void recover() {
    communicator_->recover();
    gradients_->recover();
    if (const auto failure = communicator_->failure()) {
      C10_THROW_ERROR(DistBackendError,
                      error_text("pipeline", "got a step after the group had failed: " + *failure,
                                 where_, std::string(kRebuildGroup) + "."));
    }
    if (!std::exchange(has_failed_, false)) return;
    edges_->forget_before(step_ + 1);
    skips_->forget_before(step_ + 1);
    gradients_->forget_before(step_ + 1);
  }

  // Says what a step does.
  struct Mode {
    bool trains = false;
    bool synchronizes = false;
    bool has_loss = true;
    std::optional<bool> has_strategies = {};
    double loss_scale = 1;
  };

  Evaluation run(std::vector<PipelineValue> inputs, Mode mode) {
    recover();
    try {
      return run_row(std::move(inputs), mode);
    } catch (const Interruption& interruption) {
      give_up(interruption.reason);
      throw;
    } catch (...) {
      const std::string text = give_up(text_of(std::current_exception()));
      if (!is_in_stage_ || options_.rethrows) throw;
      TORCH_CHECK(false, text);
    }
  }

 private:
  // Is an action of this rank that has something to do here.
  struct RowAction {
    ActionKind kind;
    Stage* stage;
    size_t place;  // the stage's among those of this rank
    int64_t micro_batch;
    std::string label;  // "2F3"
    std::string trace;
    bool is_recomputed = false;  // there is an R of this stage and micro-batch
    bool completes = false;      // the gradients of its stage
  };

  void add(const PipelineAction& action, bool is_recomputed) {
    if (!is_compute(action.kind)) return;
    for (size_t place = 0; place < stages_.size(); ++place) {
      Stage& stage = *stages_[place];
      if (stage.index() != action.stage) continue;
      const std::string label = to_string(action);
      actions_.push_back({action.kind, &stage, place, action.micro_batch, label,
                          "trireme::pipeline::" + label, is_recomputed});
    }
  }

  // Says whether any rank has strategies around its stages.
  bool find_strategies(const Mode& mode) {
    const bool exist = gradients_->find_strategies();
    if (mode.has_strategies) return *mode.has_strategies;
    const at::Tensor any =
        at::full({1}, exist ? 1.0 : 0.0, at::kDouble).to(communicator_->device());
    communicator_->all_reduce({any}, ReduceOp::kMax, "strategies of step " + std::to_string(step_))
        .wait();
    return any.item<double>() > 0;
  }

  // Marks the last action of each stage. Returns the places of stages in the order in which these
  // complete.
  std::vector<size_t> mark_last_actions() {
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

  Evaluation run_row(std::vector<PipelineValue> inputs, Mode mode) {
    ++step_;
    raised_in_.clear();
    current_ = nullptr;
    is_in_stage_ = false;
    communicator_->show_step(step_, /*is_done=*/false);
    const auto begin = Timed::Clock::now();
    // Strategies average what backwards bring: then losses are divided, in place of gradients.
    const bool divides_losses = mode.trains && find_strategies(mode);
    const bool is_divided = divides_losses && options_.scale_grads;
    const double divisor = is_divided ? static_cast<double>(schedule_.micro_batches) : 1;
    for (const auto& stage : stages_) stage->begin_step(mode.trains, mode.loss_scale / divisor);
    if (mode.trains) gradients_->begin_step({step_, mode.synchronizes, !divides_losses});
    inputs_ = std::move(inputs);
    result_ = {};
    losses_.clear();
    parts_of_loss_.clear();
    mode_ = mode;
    const at::AutoGradMode grad_mode(mode.trains);
    for (const RowAction& action : actions_) {
      if (!mode.trains && action.kind != ActionKind::kForward) continue;
      current_ = &action;
      run_action(action);
    }
    current_ = nullptr;
    inputs_.clear();
    if (mode.trains) gradients_->finish_row();
    result_.loss = finish();
    if (mode.trains) gradients_->end_step();
    communicator_->show_step(step_, /*is_done=*/true);
    make_report(Timed::since(begin));
    return std::exchange(result_, {});
  }

  void run_action(const RowAction& action) {
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

  void forward(const RowAction& action) {
    Stage& stage = *action.stage;
    const StageEdges::Message message{step_, stage.index(), action.micro_batch, action.label};
    StageReport& report = stage.report();
    StageInput input;
    if (!stage.is_first()) {
      const Timed waits(stage.waits().from_before);
      input = edges_->receive_onward(message);
    } else {
      input.value = take_input(action.micro_batch);
    }
    if (stage.has_skips()) {
      const Timed waits(report.waiting_ms["skips"]);
      skips_->receive_onward(message, input);
    }
    PipelineValue output;
    {
      const Timed computes(report.forward_ms);
      is_in_stage_ = true;
      output = stage.forward(action.micro_batch, std::move(input), action.is_recomputed);
      for (at::Tensor& part : stage.take_parts_of_loss())
        if (mode_.has_loss) parts_of_loss_.push_back(std::move(part));
      if (stage.is_last() && mode_.has_loss)
        keep_loss(action.micro_batch, stage.loss(action.micro_batch, output));
      is_in_stage_ = false;
    }
    if (!mode_.trains) done_with_input(stage);
    if (stage.has_skips()) {
      const Timed waits(report.waiting_ms["skips"]);
      skips_->send_onward(message, stage.take_stashed(), report);
    }
    if (!stage.is_last()) {
      const Timed waits(stage.waits().to_next);
      edges_->send_onward(message, output);
      count_sent(report, stage.index() + 1, output.tensors);
    } else if (!mode_.trains && !mode_.has_loss) {
      result_.outputs.resize(static_cast<size_t>(schedule_.micro_batches));
      result_.outputs[static_cast<size_t>(action.micro_batch)] = std::move(output);
    }
  }

  void recompute(const RowAction& action) {
    const Timed computes(action.stage->report().recompute_ms);
    is_in_stage_ = true;
    action.stage->recompute(action.micro_batch);
    is_in_stage_ = false;
  }

  void backward(const RowAction& action) {
    Stage& stage = *action.stage;
    const StageEdges::Message message{step_, stage.index(), action.micro_batch, action.label};
    StageReport& report = stage.report();
    std::vector<at::Tensor> gradients;
    if (stage.has_skips()) {
      const Timed waits(report.waiting_ms["skips"]);
      gradients = skips_->receive_back(message);
    }
    const bool wanted = stage.wants_gradients(action.micro_batch);
    if (wanted) {
      const Timed waits(stage.waits().from_next);
      for (at::Tensor& gradient : edges_->receive_back(message))
        gradients.push_back(std::move(gradient));
    }
    const bool owes = stage.owes_gradients(action.micro_batch);
    const bool splits = action.kind == ActionKind::kBackwardInput;
    {
      const Timed computes(splits ? report.input_ms : report.backward_ms);
      is_in_stage_ = true;
      gradients = splits ? stage.backward_input(action.micro_batch, gradients)
                         : stage.backward(action.micro_batch, gradients);
      is_in_stage_ = false;
    }
    if (wanted) edges_->done_with_gradients(stage.index());
    if (stage.has_skips()) {
      skips_->done_with_gradients(message);
      const size_t inputs = gradients.size() - std::min(gradients.size(), stage.popped());
      std::vector<at::Tensor> popped(std::make_move_iterator(gradients.begin() + inputs),
                                     std::make_move_iterator(gradients.end()));
      gradients.resize(inputs);
      popped.resize(stage.popped());
      const Timed waits(report.waiting_ms["skips"]);
      skips_->send_back(message, std::move(popped), report);
    }
    if (!splits) done_with_input(stage);
    if (!owes) return;
    const Timed waits(stage.waits().to_before);
    count_sent(report, stage.index() - 1, gradients);
    edges_->send_back(message, std::move(gradients));
  }

  void backward_weight(const RowAction& action) {
    Stage& stage = *action.stage;
    {
      const Timed computes(stage.report().weight_ms);
      is_in_stage_ = true;
      stage.backward_weight(action.micro_batch);
      is_in_stage_ = false;
    }
    done_with_input(stage);
  }

  void done_with_input(const Stage& stage) {
    if (!stage.is_first()) edges_->done_with_input(stage.index());
    skips_->done_with_input(stage.index());
  }

  PipelineValue take_input(int64_t micro_batch) {
    TORCH_CHECK_VALUE(
        inputs_.size() == static_cast<size_t>(schedule_.micro_batches),
        error_text("pipeline",
                   "got " + std::to_string(inputs_.size()) + " inputs, expected " +
                       std::to_string(schedule_.micro_batches) + ", one per micro-batch",
                   where_, "Cut the batch into as many."));
    return std::move(inputs_[static_cast<size_t>(micro_batch)]);
  }

  void count_sent(StageReport& report, int64_t to, const std::vector<at::Tensor>& tensors) const {
    if (edges_->is_local(report.stage, to)) return;
    ++report.messages;
    report.bytes += bytes_of(tensors);
  }

  void keep_loss(int64_t micro_batch, at::Tensor loss) {
    losses_.resize(static_cast<size_t>(schedule_.micro_batches));
    losses_[static_cast<size_t>(micro_batch)] = std::move(loss);
  }

  // Takes the loss to all ranks, once all have finished, with what layers of any stage had of it.
  // Losses are added up one after the other: mean() would add them in another order, and so round
  // otherwise than a loop in one process.
  at::Tensor finish() {
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
    at::Tensor sum = at::tensor({message.value, message.dtype, message.has_loss}, at::kDouble)
                         .to(communicator_->device());
    communicator_->all_reduce({sum}, ReduceOp::kSum, "loss of step " + std::to_string(step_))
        .wait();
    sum = sum.cpu();
    const auto* values = sum.const_data_ptr<double>();
    if (values[2] == 0) return {};
    return at::scalar_tensor(values[0],
                             at::TensorOptions().dtype(static_cast<at::ScalarType>(values[1])));
  }

  void make_report(double step_ms) {
    report_.step = step_;
    report_.step_ms = step_ms;
    report_.stages.clear();
    double computing = 0;
    for (const auto& stage : stages_) {
      const StageReport one = stage->finished_report();
      computing +=
          one.forward_ms + one.recompute_ms + one.backward_ms + one.input_ms + one.weight_ms;
      report_.stages.push_back(one);
    }
    report_.bubble = step_ms > 0 ? std::max(0.0, 1 - computing / step_ms) : 0;
  }

  // Returns what a micro-batch took in a stage of this rank, mean over these, for all stages. A
  // backward in one piece counts half as I and half as W.
  ScheduleCosts measured_costs() const {
    StageCosts sum{0, 0, 0};
    for (const StageReport& one : report_.stages) {
      sum.forward += one.forward_ms;
      sum.input += one.input_ms + one.backward_ms / 2;
      sum.weight += one.weight_ms + one.backward_ms / 2;
    }
    return {{sum}};
  }

  // Tells the others why this rank leaves the step, and drops what it has of it.
  std::string give_up(const std::string& why) noexcept {
    std::string text = why;
    try {
      const std::string action = current_ == nullptr ? "at the end of the step" : current_->label;
      const std::string stage = current_ == nullptr ? std::string() : current_->stage->text();
      if (is_in_stage_) raised_in_ = stage + " in " + action;
      const std::string verb = is_in_stage_ ? " raised in " : " gave up in ";
      text = error_text("pipeline",
                        (stage.empty() ? "a rank" : stage) + verb + action + " of step " +
                            std::to_string(step_) + ": " + why,
                        where_, "See the error of that rank; the next step begins anew");
      communicator_->announce_failure(text);
      communicator_->show_step(step_, /*is_done=*/true);
    } catch (...) {  // out of memory: the peers see their deadline instead
    }
    has_failed_ = true;
    for (const auto& stage : stages_) stage->abandon();
    edges_->abandon();
    skips_->abandon();
    gradients_->abandon(text);
    losses_.clear();
    parts_of_loss_.clear();
    result_ = {};
    inputs_.clear();
    return text;
  }

  PipelineSchedule schedule_;
  std::shared_ptr<Communicator> communicator_;
  RankOf where_;
  PipelineEngineOptions options_;
  std::unique_ptr<StageEdges> edges_;
  std::unique_ptr<SkipEdges> skips_;
  std::unique_ptr<RowGradients> gradients_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<RowAction> actions_;
  PipelineReport report_;

  // These belong to the step that runs.
  int64_t step_ = 0;
  const RowAction* current_ = nullptr;
  bool is_in_stage_ = false;
  std::string raised_in_;
  Mode mode_;
  bool has_failed_ = false;
  std::vector<PipelineValue> inputs_;
  std::vector<at::Tensor> losses_;         // one per micro-batch
  std::vector<at::Tensor> parts_of_loss_;  // what layers of this rank added, in all micro-batches
  Evaluation result_;
};

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
                                .has_strategies = mode.has_strategies,
                                .loss_scale = mode.loss_scale})
      .loss;
}

PipelineEngine::Evaluation PipelineEngine::eval_step(std::vector<PipelineValue> inputs,
                                                     bool has_loss) {
  return row_->run(std::move(inputs), {.has_loss = has_loss});
}

bool PipelineEngine::has_strategies() const { return row_->has_strategies(); }

void PipelineEngine::set_parameters(int64_t stage, NamedParameters parameters,
                                    std::vector<std::shared_ptr<HeldBackwards>> strategies) {
  row_->set_parameters(stage, std::move(parameters), std::move(strategies));
}

std::vector<at::Tensor> PipelineEngine::later_copies() const { return row_->later_copies(); }

const PipelineSchedule& PipelineEngine::schedule() const { return row_->schedule(); }

const std::string& PipelineEngine::raised_in() const { return row_->raised_in(); }

PipelineReport PipelineEngine::last_step() const { return row_->report(); }

}  // namespace trireme
