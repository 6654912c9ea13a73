#pragma once

#include <trireme/activation/activation_cache.h>
#include <trireme/comm/launch/launch.h>
#include <trireme/common/export.h>
#include <trireme/pipetransformer/elastic_course.h>
#include <trireme/pipetransformer/freeze_course.h>
#include <trireme/pipetransformer/frozen_layers.h>
#include <trireme/pipetransformer/move_layers.h>
#include <trireme/pipetransformer/plan_runner.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/pipeline/pipeline_module.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

struct PipeTransformerOptions {
  int64_t global_batch = 0;  // rows of a step, on all ranks together
  // Micro-batches of a step of one pipeline over all ranks. Under every plan they have as many
  // rows.
  int64_t chunks = 1;
  std::string schedule = "1f1b";                          // of pipelines (schedule_forms.h)
  std::optional<FreezeOptions> freeze = FreezeOptions();  // absent: nothing is frozen
  bool pipe = true;      // whether pipelines shrink as layers freeze
  bool replicas = true;  // whether ranks set free run replicas
  // Keeps what frozen layers return for each sample; null: they are computed each time.
  std::shared_ptr<ActivationCache> cache = nullptr;
  // What each layer costs while it is trained, in any unit; measured in the first step if empty.
  std::vector<double> costs = {};
};

// See PipeTransformer below.
class TRIREME_API PipeTransformerImpl : public torch::nn::Module,
                                        public HoldsParts,
                                        public FreezesLayers {
 public:
  PipeTransformerImpl(torch::nn::Sequential layers, std::shared_ptr<Communicator> ranks,
                      PipelineLoss loss, torch::optim::Optimizer& optimizer,
                      PipeTransformerOptions options);

  // Trains on a global batch, which every rank gives whole, and steps the optimizer. Returns the
  // mean loss, 0-dim, on all ranks. `ids` say which sample each row is; needed with a cache.
  // Collective. Throws ValueError on all ranks for a batch of other rows, and what the strategies
  // throw.
  at::Tensor step(const at::Tensor& input, const at::Tensor& ids, const at::Tensor& target);
  at::Tensor step(const at::Tensor& input, const at::Tensor& target) {
    return step(input, at::Tensor(), target);
  }

  // Returns the mean loss of a batch of as many rows, keeping no graph and leaving the cache alone;
  // trains nothing. Collective.
  at::Tensor eval_step(const at::Tensor& input, const at::Tensor& target);

  // Ends an epoch, or any number of steps: freezes layers, and transforms to the plan that fits.
  // Returns what the epoch was. Collective.
  const ElasticEpoch& end_epoch();
  // Goes to any plan of all ranks. Collective; what it costs and throws: move_layers.h. Where it
  // throws ValueError the present plan goes on.
  void transform(const ElasticPlan& plan);

  const ElasticPlan& plan() const { return course_->plan(); }
  const std::vector<ElasticEpoch>& history() const { return course_->history(); }
  int64_t frozen() const;  // layers of the Sequential, from the input on

  // Return and set how far freezing has come. Setting it transforms to the plan that fits, on all
  // ranks alike. Throws ValueError for a run without freezing.
  const FreezeState& freeze_state() const;
  void load_freeze_state(const FreezeState& state);

  // Frozen layers stay in evaluation mode.
  void train(bool on = true) override;

  // See HoldsParts: save_checkpoint() and load_checkpoint() take the run, under any plan.
  void add_parts(HeldParts& parts) const override;
  void begin_writing() override {}
  // See FreezesLayers: how far freezing has come is a part of a checkpoint.
  at::Tensor frozen_numbers() const override;
  void load_frozen_numbers(const at::Tensor& numbers) override;

 private:
  using Clock = std::chrono::steady_clock;

  void begin(const at::Tensor& input);
  void follow_freezing();
  void move_to(const ElasticPlan& plan);
  void rebuild();
  std::vector<LayerMove> moves_to(const ElasticPlan& plan) const;
  NamedTensors parameters_of(size_t layer) const;
  NamedTensors tensors_of(size_t layer) const;
  void release(size_t layer) const;
  void check_modules() const;
  void check_optimizer() const;
  void check_shared() const;
  void announce(const std::string& why) noexcept;
  int64_t hits() const;

  torch::nn::Sequential layers_;
  std::shared_ptr<Communicator> ranks_;
  torch::optim::Optimizer* optimizer_;
  PipeTransformerOptions options_;
  PipelineLoss loss_;
  std::unique_ptr<ElasticCourse> course_;
  std::unique_ptr<FrozenLayers> frozen_layers_;  // null where nothing is frozen
  std::unique_ptr<FreezeCourse> freezing_;
  std::vector<int64_t> frozen_ends_;  // how many layers the first, the first two, ... entries are
  std::unique_ptr<PlanRunner> runner_;
  int64_t hits_before_ = 0;  // of earlier epochs
  Clock::time_point epoch_begins_ = Clock::now();
};

// Trains a Sequential on ranks that first are one pipeline. As its layers freeze from the input on,
// pipelines shrink and multiply, and what frozen layers return is kept (PipeTransformer, He et al.,
// ICML 2021):
//
//   trireme::Context ctx = trireme::init();
//   torch::optim::AdamW optimizer(net->parameters());
//   trireme::PipeTransformer<> run(net, loss_of, optimizer, {.global_batch = 64, .chunks = 8});
//   for (epochs) {
//     for (batches) run->step(x, y);   // the whole batch on every rank; steps the optimizer
//     run->end_epoch();
//   }
//
// Layers take and return one tensor, and share no parameters. Rank 0's values count at the
// beginning. The optimizer is one over the parameters of all layers, on every rank; parameters and
// optimizer stay the same objects, and those of layers that a rank does not hold have no memory
// (layer_memory.h). Losses and gradients are those of one process that freezes alike, up to the
// order of sums. The net and the optimizer outlive the run, which ends before the Context shuts
// down.
//
// The constructor is collective. It throws ValueError on all ranks for arguments that cannot be
// used or differ, and TypeError for an optimizer whose states are not known.
template <typename Net = torch::nn::Sequential>
class PipeTransformer : public torch::nn::ModuleHolder<PipeTransformerImpl> {
 public:
  PipeTransformer(const Net& net, std::shared_ptr<Communicator> ranks, PipelineLoss loss,
                  torch::optim::Optimizer& optimizer, PipeTransformerOptions options)
      : ModuleHolder(std::make_shared<PipeTransformerImpl>(net, std::move(ranks), std::move(loss),
                                                           optimizer, std::move(options))) {}
  // Trains over the group of the Context that trireme::init() returned.
  PipeTransformer(const Net& net, PipelineLoss loss, torch::optim::Optimizer& optimizer,
                  PipeTransformerOptions options)
      : PipeTransformer(net, current_communicator(), std::move(loss), optimizer,
                        std::move(options)) {}
};

}  // namespace trireme
