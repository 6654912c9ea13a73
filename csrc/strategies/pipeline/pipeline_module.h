#pragma once

#include <trireme/optim/grad_norm.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/pipeline/deferred_batch_norm.h>
#include <trireme/strategies/pipeline/micro_batches.h>
#include <trireme/strategies/pipeline/pipeline_options.h>
#include <trireme/strategies/pipeline/runner.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/threads/call_turn.h>
#include <trireme/sync/no_sync.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Takes an output and a target, and returns a loss, 0-dim.
using PipelineLoss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

// The calls that Pipeline and StagePipeline have in common: each cuts a batch into micro-batches,
// and has a PipelineRunner take them through the stages, whose layers are modules of this one.
class TRIREME_API PipelineModule : public torch::nn::Module, public HoldsCodes {
 public:
  // Takes all that the last stage returned for a micro-batch, and its target.
  using Loss =
      std::function<at::Tensor(const std::vector<at::Tensor>& outputs, const at::Tensor& target)>;

  // Steps while the guard lives only accumulate gradients in this replica of the pipeline; the
  // first one after it averages what has come together. All replicas do so alike.
  [[nodiscard]] NoSync no_sync() { return NoSync(synchronizes_); }

  // Scales the gradients of all ranks' layers to a common norm of at most `max_norm`; returns the
  // norm before, the same on all ranks. See optim/grad_norm.h. Collective: one all-reduce of one
  // number.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0,
                             bool error_if_nonfinite = false);
  // Returns this rank's part of the gradients, for trireme::clip_grad_norm_() over several models.
  std::vector<GradNormPart> gradients() const;

  const PipelineSchedule& schedule() const { return runner_->schedule(); }
  std::vector<KeptCodes> kept_codes() const override;
  PipelineReport last_step() const { return runner_->last_step(); }

 protected:
  using Tensors = std::vector<at::Tensor>;

  // Collective. start() follows.
  PipelineModule(std::shared_ptr<Communicator> communicator, const PipelineOptions& options);

  const PipelineRanks& ranks() const { return ranks_; }
  // Registers a layer, and adds what it has to the request of its stage.
  void add_layer(PipelineStageRequest& stage, const std::string& name,
                 const std::shared_ptr<torch::nn::Module>& layer);
  // Returns the function of a stage whose layers take and return these tensors.
  std::shared_ptr<StageFunction> function_of(std::function<Tensors(Tensors)> layers);
  // Makes the runner. On ranks, `stages` are those of this one. `engine_options` lack what follows
  // from `options`. Collective.
  void start(const PipelineOptions& options, PipelineSchedule schedule,
             std::vector<PipelineStageRequest> stages, PipelineEngineOptions engine_options);

  // See Pipeline::step(), eval_step() and forward(). The outputs are those of the last stage, each
  // put together from all micro-batches: none on the ranks of others.
  at::Tensor step_batch(const Tensors& inputs, const at::Tensor& target, const Loss& loss);
  at::Tensor eval_batch(const Tensors& inputs, const at::Tensor& target, const Loss& loss);
  Tensors outputs_of_batch(const Tensors& inputs);
  at::Tensor run_pass(const at::Tensor& input, Recomputation checkpoint);
  // Returns a loss of several outputs that refers to one of a single output.
  static Loss of_one(const PipelineLoss& loss);

 private:
  class Function;

  void begin(const Tensors& inputs, const at::Tensor& target);
  PipelineRunner::Evaluation run_forwards(bool has_loss);

  int64_t dim_;
  int64_t chunks_;
  bool defers_batch_norms_;
  bool synchronizes_ = true;
  PipelineRanks ranks_;
  CallTurn turn_;  // held by the call that uses batch_, loss_ and batch_norms_
  MicroBatches batch_;
  const Loss* loss_ = nullptr;
  DeferredBatchNorms batch_norms_;
  std::unique_ptr<PipelineRunner> runner_;
};

}  // namespace trireme
