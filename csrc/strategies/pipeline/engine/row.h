#pragma once

#include <trireme/strategies/pipeline/engine.h>
#include <trireme/strategies/pipeline/gradients/row_gradients.h>
#include <trireme/strategies/pipeline/schedule_costs.h>
#include <trireme/strategies/pipeline/skip_edges.h>
#include <trireme/strategies/pipeline/stage.h>
#include <trireme/strategies/pipeline/stage_edges.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// A row's state of a pass, between its forwards and its backwards.
struct KeptRow {
  std::vector<std::vector<Stage::Live>> live = {};  // per stage of the row
  std::vector<std::vector<bool>> due = {};          // see SkipEdges
};

// Runs the actions of one row; see the note in engine.h. Its functions are in two sources: those
// around the actions of a step (row.cpp), and the actions (row_actions.cpp).
class PipelineEngine::Row {
 public:
  Row(PipelineSchedule schedule, std::vector<PipelineStageRequest> stages,
      std::shared_ptr<Communicator> communicator, const PipelineEngineOptions& options);

  const PipelineSchedule& schedule() const { return schedule_; }
  const std::string& raised_in() const { return raised_in_; }

  PipelineReport report() const;

  void set_parameters(int64_t stage, NamedParameters parameters,
                      std::vector<std::shared_ptr<HeldBackwards>> strategies);

  std::vector<at::Tensor> later_copies() const { return gradients_->later_copies(); }
  bool has_strategies() const { return gradients_->has_strategies(); }
  bool divides_losses() const { return sends_gradients_ || has_strategies(); }

  void recover();

  // The kind of a run: a step, an evaluation, or one half of a pass.
  struct Mode {
    bool trains = false;
    bool synchronizes = false;
    bool has_loss = true;
    std::optional<bool> divides_losses = {};
    bool asks_to_divide_losses = false;
    double loss_scale = 1;
    bool is_pass = false;
    bool takes_losses = false;
    bool forwards = true;
    bool backwards = true;
    bool keep_graph = false;
  };

  Evaluation run(std::vector<PipelineValue> inputs, const Mode& mode);

  // See PipelineEngine.
  PassOutputs forward_pass(std::vector<PipelineValue> inputs, const PassOptions& options);
  void backward_pass(KeptRow& kept, const PassBackward& backward);

 private:
  // An action of this rank that computes.
  struct RowAction {
    ActionKind kind;
    Stage* stage;
    size_t place;  // index of the stage among those of this rank
    int64_t micro_batch;
    std::string label;  // in words
    std::string trace;
    bool is_recomputed = false;  // there is an R of this stage and micro-batch
    bool completes = false;      // the gradients of its stage
  };

  void add(const PipelineAction& action, bool is_recomputed);

  // Returns whether any rank divides losses in place of gradients.
  bool find_divided_losses(const Mode& mode);

  // Marks the last action of each stage. Returns the places of stages in the order in which these
  // complete.
  std::vector<size_t> mark_last_actions();

  // Tells the other ranks what it throws.
  Evaluation run_or_give_up(std::vector<PipelineValue> inputs, const Mode& mode);
  Evaluation run_row(std::vector<PipelineValue> inputs, const Mode& mode);
  void begin(std::vector<PipelineValue> inputs, const Mode& mode);
  void run_actions();

  void run_action(const RowAction& action);

  void forward(const RowAction& action);

  void recompute(const RowAction& action);

  void backward(const RowAction& action);

  void backward_weight(const RowAction& action);

  void done_with_input(const Stage& stage);

  PipelineValue take_input(int64_t micro_batch);

  void count_sent(StageReport& report, int64_t to, const std::vector<at::Tensor>& tensors) const;

  // Looks in the graph of a micro-batch for leaves that are no parameters of a stage.
  void look_for_unlisted(const RowAction& action);

  void keep_loss(int64_t micro_batch, const at::Tensor& loss);
  void keep_part_of_loss(const RowAction& action, StageLoss part);

  // Returns the loss on all ranks, once all have finished, with the parts that layers of any stage
  // added. Losses are added up one after the other: mean() would add them in another order, and so
  // round otherwise than a loop in one process.
  at::Tensor finish();

  void make_report(double step_ms);

  // Returns the times of the last step, summed up over the stages of this rank, as the costs of
  // every stage: only their ratios count. A backward in one piece counts half as I and half as W.
  ScheduleCosts measured_costs() const;

  // Tells the other ranks why this rank leaves the step, and drops its state of the step.
  std::string give_up(const std::string& why) noexcept;

  PipelineSchedule schedule_;
  std::shared_ptr<Communicator> communicator_;
  RankOf where_;
  PipelineEngineOptions options_;
  std::unique_ptr<StageEdges> edges_;
  std::unique_ptr<SkipEdges> skips_;
  std::unique_ptr<RowGradients> gradients_;
  std::vector<std::unique_ptr<Stage>> stages_;
  bool sends_gradients_ = false;
  std::vector<RowAction> actions_;
  PipelineReport report_;

  // These belong to the step that runs.
  int64_t step_ = 0;
  const RowAction* current_ = nullptr;
  bool is_in_stage_ = false;
  std::string raised_in_;
  Mode mode_;
  bool divides_losses_ = false;
  bool has_failed_ = false;
  std::vector<PipelineValue> inputs_;
  std::vector<at::Tensor> losses_;         // one per micro-batch
  std::vector<at::Tensor> parts_of_loss_;  // what layers of this rank added, in all micro-batches
  int64_t losses_without_graph_ = 0;       // micro-batches
  int64_t parts_with_graph_ = 0;
  bool lacks_graph_ = false;  // no loss, and no part of it, has one on any rank
  Evaluation result_;
  std::vector<PassLoss> pass_losses_;
  const PassBackward* pass_ = nullptr;  // the one whose backward runs
};

}  // namespace trireme
