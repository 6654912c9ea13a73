#pragma once

#include <trireme/comm/launch/launch.h>
#include <trireme/module/module_of_tensors.h>
#include <trireme/strategies/pipeline/micro_batch_scope.h>
#include <trireme/strategies/pipeline/pipeline_module.h>
#include <trireme/strategies/pipeline/pipeline_options.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

struct PipelineStageOptions {
  int64_t stage = 0;      // counts from 0
  int64_t stages = 1;     // how many the whole pipeline has
  std::string name = {};  // for messages; the module's class if empty
};

// One stage of a pipeline: a module of any class that has a forward, by holder or shared_ptr. The
// forward takes tensors, or a tuple or a vector of tensors, and returns one tensor, or a tuple or a
// vector of them. It is called with what the stage before returns.
class PipelineStage {
 public:
  template <typename Module>
  PipelineStage(Module module, PipelineStageOptions options)
      : module_(module_of_tensors(std::move(module))), options_(std::move(options)) {
    if (options_.name.empty()) options_.name = module_.module->name();
  }

  const ModuleOfTensors& module() const { return module_; }
  const PipelineStageOptions& options() const { return options_; }

 private:
  ModuleOfTensors module_;
  PipelineStageOptions options_;
};

// One tensor, or several.
class PipelineTensors {
 public:
  PipelineTensors(at::Tensor tensor) : tensors_{std::move(tensor)} {}  // NOLINT: converts
  PipelineTensors(std::vector<at::Tensor> tensors)                     // NOLINT: converts
      : tensors_(std::move(tensors)) {}
  PipelineTensors(std::initializer_list<at::Tensor> tensors) : tensors_(tensors) {}

  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

// See StagePipeline below.
class TRIREME_API StagePipelineImpl : public PipelineModule {
 public:
  StagePipelineImpl(std::vector<PipelineStage> stages, std::shared_ptr<Communicator> communicator,
                    const PipelineOptions& options);
  explicit StagePipelineImpl(std::vector<PipelineStage> stages, const PipelineOptions& options = {})
      : StagePipelineImpl(std::move(stages), options.ranks ? current_communicator() : nullptr,
                          options) {}

  // Trains on a batch, as Pipeline::step() does: every rank gives all of it. Where there are
  // several inputs, the first stage's forward takes all of them, and forwards of other stages may
  // ask for them (micro_batch_scope.h). Collective.
  at::Tensor step(const PipelineTensors& inputs, const at::Tensor& target, const Loss& loss) {
    return step_batch(inputs.tensors(), target, loss);
  }
  at::Tensor step(const PipelineTensors& inputs, const at::Tensor& target,
                  const PipelineLoss& loss) {
    return step_batch(inputs.tensors(), target, of_one(loss));
  }

  // Computes the loss of a batch, keeping no graph. Collective.
  at::Tensor eval_step(const PipelineTensors& inputs, const at::Tensor& target, const Loss& loss) {
    return eval_batch(inputs.tensors(), target, loss);
  }
  at::Tensor eval_step(const PipelineTensors& inputs, const at::Tensor& target,
                       const PipelineLoss& loss) {
    return eval_batch(inputs.tensors(), target, of_one(loss));
  }
  // Computes the outputs of a batch, keeping no graph: on the rank of the last stage, none
  // elsewhere. Collective.
  std::vector<at::Tensor> eval_step(const PipelineTensors& inputs) {
    return outputs_of_batch(inputs.tensors());
  }

 private:
  PipelineStageRequest request_of(const PipelineStage& stage);
};

// A pipeline of which each rank makes its own stages only, where no rank could hold the module that
// Pipeline cuts:
//
//   Context ctx = trireme::init();
//   trireme::PipelineStage stage(MyBlocks(...), {.stage = ctx.rank(), .stages = ctx.world()});
//   trireme::StagePipeline pipe({stage}, {.chunks = 8, .schedule = "1f1b"});
//   torch::optim::Adam optimizer(pipe->parameters());   // those of this rank's stages
//   auto loss = pipe->step(x, y, loss_fn);
//   optimizer.step();
//
// A rank gives the stages that the schedule has on it: with "interleaved-1f1b" on two ranks, for
// instance, stages 0 and 2 on the first. The pipeline has them as "stage0", "stage2". In options
// `balance` is refused, and `skips` count stages; all ranks give all of these. Stages of one rank
// may share parameters; those of several ranks share none, since no rank sees them both. Losses and
// gradients are those of one process, bit for bit.
//
// The constructor is collective. It throws ValueError on all ranks where one has stages that the
// schedule does not have there.
class StagePipeline : public torch::nn::ModuleHolder<StagePipelineImpl> {
 public:
  using torch::nn::ModuleHolder<StagePipelineImpl>::ModuleHolder;
  explicit StagePipeline(std::vector<PipelineStage> stages, const PipelineOptions& options = {})
      : ModuleHolder(std::make_shared<StagePipelineImpl>(std::move(stages), options)) {}
  StagePipeline(std::vector<PipelineStage> stages, std::shared_ptr<Communicator> communicator,
                const PipelineOptions& options = {})
      : ModuleHolder(std::make_shared<StagePipelineImpl>(std::move(stages), std::move(communicator),
                                                         options)) {}
};

}  // namespace trireme
