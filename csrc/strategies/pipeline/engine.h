#pragma once

#include <trireme/strategies/pipeline/gradients/rank_gradients.h>
#include <trireme/strategies/pipeline/runner.h>
#include <trireme/strategies/pipeline/schedule_costs.h>
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

// What a rank keeps of a pass between its forwards and its backwards.
struct KeptGraphs {
  std::vector<std::vector<Stage::Live>> live = {};  // per stage of the rank
  std::vector<std::vector<bool>> due = {};          // see StageEdges
};

// [Note: how a rank runs its actions]
//
// The thread that calls step() runs the actions of its rank one after the other. Messages follow
// from what computes: a forward waits for its input and sends its outputs as soon as it has them, a
// backward does so with gradients. A table's own sends and receives change nothing of this:
// check_schedule() has seen that their order never ends in a circle, and sending earlier closes
// none. UNSHARD, RESHARD and REDUCE_GRAD have no effect here.
//
// A stage's gradients are complete with its last B or W. Replicas of the pipeline average them then
// (replicas.h); so do strategies that its layers are wrapped in, which hold back until then
// (stage_strategies.h).
//
// At the end of a step one small collective takes the loss to all ranks. It tells them, too, that
// all have finished: so an exception of one rank comes out of step() on all.

// Runs the actions of one rank of a schedule.
//
// Cost of a step: per micro-batch and pair of stages on different ranks one message onward and,
// where gradients are due, one back, and as many for each pair of stages with skips; one all-reduce
// of 40 bytes; TiedParameters and PipelineReplicas say what these cost. Memory: what autograd keeps
// of the micro-batches that are live, and slots for messages: check_schedule() says how many, and
// skips have one per micro-batch.
//
// It is made and destroyed without the GIL.
//
// Its functions are in two sources: what there is around the actions of a step, and the actions
// (engine_actions.cpp).
class TRIREME_API PipelineEngine final : public PipelineRunner {
 public:
  // Collective over the communicator, which has as many ranks as the schedule; all ranks give the
  // same schedule and options. Throws ValueError, on all ranks alike, where they do not, and for
  // stages that are not those of the schedule on this rank.
  PipelineEngine(PipelineSchedule schedule, std::vector<PipelineStageRequest> stages,
                 std::shared_ptr<Communicator> communicator, const PipelineEngineOptions& options);
  PipelineEngine(const PipelineEngine&) = delete;
  PipelineEngine& operator=(const PipelineEngine&) = delete;

  using PipelineRunner::step;
  void recover() override;
  at::Tensor step(std::vector<PipelineValue> inputs, const StepMode& mode) override;
  Evaluation eval_step(std::vector<PipelineValue> inputs, bool has_loss) override;
  bool has_strategies() const override { return gradients_->has_strategies(); }
  bool divides_losses() const override { return sends_gradients_ || has_strategies(); }
  std::vector<at::Tensor> later_copies() const override { return gradients_->later_copies(); }
  std::vector<KeptCodes> kept_codes() const override { return gradients_->kept_codes(); }
  const PipelineSchedule& schedule() const override { return schedule_; }
  const std::string& raised_in() const override { return raised_in_; }
  PipelineReport last_step() const override;

  // Run the forwards of a pass, and its backwards. Collective; for threads only. Gradients
  // come to .grad of the leaves that PipelineStageRequest::leaves names.
  PassOutputs forward_pass(std::vector<PipelineValue> inputs, const PassOptions& options);
  void backward_pass(KeptGraphs& kept, const PassBackward& backward);

  // Replaces the parameters of a stage, and the strategies around its layers, from the next step
  // on. Throws ValueError where a tied parameter is missing.
  void set_parameters(int64_t stage, NamedParameters parameters,
                      std::vector<std::shared_ptr<DeferredSync>> strategies = {});
  // Replaces the buffers of all stages of this rank: in each step replicas begin with those of the
  // first one.
  void set_buffers(std::vector<at::Tensor> buffers) { gradients_->set_buffers(std::move(buffers)); }

 private:
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

  // An action of this rank that computes.
  struct ComputeAction {
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
  Evaluation run_or_abort(std::vector<PipelineValue> inputs, const Mode& mode);
  Evaluation run_batch(std::vector<PipelineValue> inputs, const Mode& mode);
  void begin(std::vector<PipelineValue> inputs, const Mode& mode);
  void run_actions();

  void run_action(const ComputeAction& action);

  void forward(const ComputeAction& action);

  void recompute(const ComputeAction& action);

  void backward(const ComputeAction& action);

  void backward_weight(const ComputeAction& action);

  PipelineValue take_input(int64_t micro_batch);

  // Looks in the graph of a micro-batch for leaves that are no parameters of a stage.
  void look_for_unlisted(const ComputeAction& action);

  void keep_loss(int64_t micro_batch, const at::Tensor& loss);
  void keep_part_of_loss(const ComputeAction& action, StageLoss part);

  // Returns the loss on all ranks, once all have finished, with the parts that layers of any stage
  // added. Losses are added up one after the other: mean() would add them in another order, and so
  // round otherwise than a loop in one process.
  at::Tensor finish();

  void make_report(double step_ms);

  // Returns the times of the last step, summed up over the stages of this rank, as the costs of
  // every stage: only their ratios count. A backward in one piece counts half as I and half as W.
  ScheduleCosts measured_costs() const;

  // Tells the other ranks why this rank leaves the step, and drops its state of the step.
  std::string abort_step(const std::string& why) noexcept;

  PipelineSchedule schedule_;
  std::shared_ptr<Communicator> communicator_;
  RankOf where_;
  PipelineEngineOptions options_;
  std::unique_ptr<StageEdges> edges_;
  std::unique_ptr<RankGradients> gradients_;
  std::vector<std::unique_ptr<Stage>> stages_;
  bool sends_gradients_ = false;
  std::vector<ComputeAction> actions_;
  PipelineReport report_;

  // These belong to the step that runs.
  int64_t step_ = 0;
  const ComputeAction* current_ = nullptr;
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
