#include <trireme/strategies/pipeline/engine.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/comm/group_health.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/interruption.h>
#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_costs.h>
#include <trireme/strategies/pipeline/skip_edges.h>
#include <trireme/strategies/pipeline/stage.h>
#include <trireme/strategies/pipeline/stage_edges.h>
#include <trireme/strategies/pipeline/step_gradients.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <chrono>
#include <exception>
#include <iterator>
#include <utility>

namespace trireme {
namespace {

using Clock = std::chrono::steady_clock;

double ms(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

// Adds the time for which it lives to a sum.
class Timed {
 public:
  explicit Timed(double& sum) : sum_(sum), begin_(Clock::now()) {}
  ~Timed() { sum_ += ms(Clock::now() - begin_); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& sum_;
  Clock::time_point begin_;
};

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
    check_agreement(stages);
    edges_ = std::make_unique<StageEdges>(schedule_, *communicator_);
    skips_ = std::make_unique<SkipEdges>(schedule_, options_.skips, *communicator_);
    tied_ = std::make_unique<TiedParameters>(schedule_, options_.tied, *communicator_);
    for (PipelineStageRequest& request : stages) {
      tied_->set_parameters(request.stage, request.parameters);
      parameters_.push_back(request.parameters.tensors);
      StageSkips skips = skips_->skips_of(request.stage);
      stages_.push_back(std::make_unique<Stage>(std::move(request), schedule_, std::move(skips)));
    }
    tied_->spread_values();
    for (const PipelineAction& action : schedule_.rows[static_cast<size_t>(where_.rank)]) {
      for_each_part(action, [&](const PipelineAction& part) { add(part); });
    }
  }

  const PipelineSchedule& schedule() const { return schedule_; }

  PipelineReport report() const {
    PipelineReport report = report_;
    report.computed_bubble = bubble(schedule_, measured_costs());
    return report;
  }

  void set_parameters(int64_t stage, NamedParameters parameters) {
    for (size_t i = 0; i < stages_.size(); ++i) {
      if (stages_[i]->index() == stage) {
        const std::string missing = tied_->set_parameters(stage, parameters);
        if (!missing.empty()) refuse_pipeline("got " + missing, "Make the pipeline anew.");
        parameters_[i] = std::move(parameters.tensors);
        return;
      }
    }
    refuse_pipeline("got parameters of stage " + std::to_string(stage) + ", which rank " +
                        std::to_string(where_.rank) + " does not hold",
                    "Give those of a stage of this rank.");
  }

  std::vector<at::Tensor> later_copies() const { return tied_->later_copies(); }

  void recover() {
    communicator_->recover();
    if (const auto failure = communicator_->failure()) {
      C10_THROW_ERROR(DistBackendError,
                      error_text("pipeline", "got a step after the group had failed: " + *failure,
                                 where_, std::string(kRebuildGroup) + "."));
    }
    if (!std::exchange(has_failed_, false)) return;
    edges_->forget_before(step_ + 1);
    skips_->forget_before(step_ + 1);
    tied_->forget_before(step_ + 1);
  }

  Evaluation run(std::vector<PipelineValue> inputs, bool trains, bool has_loss) {
    recover();
    try {
      return run_row(std::move(inputs), trains, has_loss);
    } catch (const Interruption& interruption) {
      give_up(interruption.reason);
      throw;
    } catch (...) {
      const std::string text = give_up(text_of(std::current_exception()));
      if (!is_in_stage_) throw;
      TORCH_CHECK(false, text);
    }
  }

 private:
  // Is an action of this rank that has something to do here.
  struct RowAction {
    ActionKind kind;
    Stage* stage;
    int64_t micro_batch;
    std::string label;  // "2F3"
    std::string trace;
  };

  // All ranks say what they were given, and compare.
  void check_agreement(const std::vector<PipelineStageRequest>& stages) const {
    std::string own;
    if (schedule_.ranks != where_.world) {
      own = "!a schedule for " + std::to_string(schedule_.ranks) + " ranks, expected one for " +
            std::to_string(where_.world);
    }
    std::vector<int64_t> given;
    for (const PipelineStageRequest& request : stages) given.push_back(request.stage);
    std::vector<int64_t> expected;
    for (int64_t stage = 0; stage < schedule_.stages; ++stage) {
      if (schedule_.stage_rank[static_cast<size_t>(stage)] == where_.rank)
        expected.push_back(stage);
    }
    if (own.empty() && given != expected) {
      own = c10::str("!stages ", given, ", expected stages ", expected, " by the schedule");
    }
    for (const PipelineAction& action :
         schedule_.rows[static_cast<size_t>(std::min<int64_t>(where_.rank, schedule_.ranks - 1))]) {
      for_each_part(action, [&](const PipelineAction& part) {
        if (part.kind == ActionKind::kRecompute && own.empty())
          own = "!the action " + to_string(part) + ", which the engine cannot run yet";
      });
    }
    if (own.empty()) {
      own = c10::str(schedule_.stages, " stages, ", schedule_.micro_batches,
                     " micro-batches, scale_grads=", options_.scale_grads, ", table ",
                     std::hash<std::string>()(to_csv(schedule_, TableForm::kAsItIs)));
      for (const PipelineSkip& skip : options_.skips)
        own += c10::str(", '", skip.name, "' from stage ", skip.from, " to stage ", skip.to);
      for (const TiedParameter& tied : options_.tied) {
        own += ", tied";
        for (const auto& holder : tied.holders)
          own += c10::str(" '", holder.name, "' of stage ", holder.stage);
      }
    }
    const auto texts = gather_texts(own, *communicator_, communicator_->device());
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (!texts[rank].empty() && texts[rank].front() == '!') {
        refuse_pipeline("got " + texts[rank].substr(1) + " (rank " + std::to_string(rank) + " of " +
                            std::to_string(where_.world) + ")",
                        "Give each rank the same schedule, and its own stages.");
      }
    }
    for (size_t rank = 1; rank < texts.size(); ++rank) {
      if (texts[rank] == texts[0]) continue;
      refuse_pipeline(
          "got " + texts[0] + " on rank 0, and " + texts[rank] + " on rank " + std::to_string(rank),
          "Give all ranks the same schedule and options.");
    }
  }

  void add(const PipelineAction& action) {
    if (!is_compute(action.kind)) return;
    for (const auto& stage : stages_) {
      if (stage->index() != action.stage) continue;
      const std::string label = to_string(action);
      actions_.push_back(
          {action.kind, stage.get(), action.micro_batch, label, "trireme::pipeline::" + label});
    }
  }

  Evaluation run_row(std::vector<PipelineValue> inputs, bool trains, bool has_loss) {
    ++step_;
    current_ = nullptr;
    is_in_stage_ = false;
    communicator_->show_step(step_, /*is_done=*/false);
    const auto begin = Clock::now();
    for (const auto& stage : stages_) stage->begin_step(trains);
    if (trains) begin_gradients();
    inputs_ = std::move(inputs);
    result_ = {};
    losses_.clear();
    has_loss_ = has_loss;
    const at::AutoGradMode grad_mode(trains);
    for (const RowAction& action : actions_) {
      if (!trains && action.kind != ActionKind::kForward) continue;
      current_ = &action;
      run_action(action, trains);
    }
    current_ = nullptr;
    inputs_.clear();
    if (trains) tied_->sum_gradients(step_);
    result_.loss = finish();
    if (trains) gradients_.end(options_.scale_grads ? schedule_.micro_batches : 1);
    communicator_->show_step(step_, /*is_done=*/true);
    make_report(ms(Clock::now() - begin));
    return std::exchange(result_, {});
  }

  void begin_gradients() {
    std::vector<at::Tensor> all;
    for (const auto& parameters : parameters_)
      all.insert(all.end(), parameters.begin(), parameters.end());
    gradients_.begin(all);
  }

  void run_action(const RowAction& action, bool trains) {
    at::RecordFunction range(at::RecordScope::FUNCTION);
    if (range.isActive()) range.before(action.trace);
    if (action.kind == ActionKind::kForward) {
      forward(action, trains);
    } else if (action.kind == ActionKind::kBackwardWeight) {
      backward_weight(action);
    } else {
      backward(action);
    }
  }

  void forward(const RowAction& action, bool trains) {
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
      output = stage.forward(action.micro_batch, std::move(input));
      if (stage.is_last() && has_loss_)
        keep_loss(action.micro_batch, stage.loss(action.micro_batch, output));
      is_in_stage_ = false;
    }
    if (!trains) done_with_input(stage);
    if (stage.has_skips()) {
      const Timed waits(report.waiting_ms["skips"]);
      skips_->send_onward(message, stage.take_stashed(), report);
    }
    if (!stage.is_last()) {
      const Timed waits(stage.waits().to_next);
      edges_->send_onward(message, output);
      count_sent(report, stage.index() + 1, output.tensors);
    } else if (!trains && !has_loss_) {
      result_.outputs.resize(static_cast<size_t>(schedule_.micro_batches));
      result_.outputs[static_cast<size_t>(action.micro_batch)] = std::move(output);
    }
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

  // Takes the loss to all ranks, once all have finished. Losses are added up one after the other:
  // mean() would add them in another order, and so round otherwise than a loop in one process.
  at::Tensor finish() {
    LossMessage message;
    if (!losses_.empty()) {
      at::Tensor loss = losses_.front().clone();
      for (size_t i = 1; i < losses_.size(); ++i) loss.add_(losses_[i]);
      if (options_.scale_grads) loss.div_(schedule_.micro_batches);
      message = {loss.item<double>(), static_cast<double>(loss.scalar_type()), 1};
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
      computing += one.forward_ms + one.backward_ms + one.input_ms + one.weight_ms;
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
      std::string stage;
      if (current_ != nullptr) {
        stage = "stage " + std::to_string(current_->stage->index());
        if (!current_->stage->name().empty()) stage += " (" + current_->stage->name() + ")";
      }
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
    gradients_.abandon();
    losses_.clear();
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
  std::unique_ptr<TiedParameters> tied_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<std::vector<at::Tensor>> parameters_;  // one list per stage of this rank
  std::vector<RowAction> actions_;
  StepGradients gradients_;
  PipelineReport report_;

  // These belong to the step that runs.
  int64_t step_ = 0;
  const RowAction* current_ = nullptr;
  bool is_in_stage_ = false;
  bool has_loss_ = false;
  bool has_failed_ = false;
  std::vector<PipelineValue> inputs_;
  std::vector<at::Tensor> losses_;  // one per micro-batch
  Evaluation result_;
};

PipelineEngine::PipelineEngine(PipelineSchedule schedule, std::vector<PipelineStageRequest> stages,
                               std::shared_ptr<Communicator> communicator,
                               const PipelineEngineOptions& options)
    : row_(std::make_unique<Row>(std::move(schedule), std::move(stages), std::move(communicator),
                                 options)) {}

PipelineEngine::~PipelineEngine() = default;

void PipelineEngine::recover() { row_->recover(); }

at::Tensor PipelineEngine::step(std::vector<PipelineValue> inputs) {
  return row_->run(std::move(inputs), /*trains=*/true, /*has_loss=*/true).loss;
}

PipelineEngine::Evaluation PipelineEngine::eval_step(std::vector<PipelineValue> inputs,
                                                     bool has_loss) {
  return row_->run(std::move(inputs), /*trains=*/false, has_loss);
}

void PipelineEngine::set_parameters(int64_t stage, NamedParameters parameters) {
  row_->set_parameters(stage, std::move(parameters));
}

std::vector<at::Tensor> PipelineEngine::later_copies() const { return row_->later_copies(); }

const PipelineSchedule& PipelineEngine::schedule() const { return row_->schedule(); }

PipelineReport PipelineEngine::last_step() const { return row_->report(); }

}  // namespace trireme
