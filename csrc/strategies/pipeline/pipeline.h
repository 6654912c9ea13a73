#pragma once

#include <trireme/comm/launch/launch.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/pipeline/micro_batch_scope.h>
#include <trireme/strategies/pipeline/pipeline_module.h>
#include <trireme/strategies/pipeline/pipeline_options.h>

#include <c10/core/Device.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

// A layer of the net that a pipeline cuts.
struct PipelineLayer {
  std::string name = {};  // in the net
  std::shared_ptr<torch::nn::Module> module = nullptr;
  std::function<at::Tensor(at::Tensor)> forward = {};
};

// See Pipeline below.
class TRIREME_API PipelineImpl : public PipelineModule, public HoldsStages {
 public:
  // Takes all layers of `net`, in their order, and keeps those of this rank.
  PipelineImpl(const torch::nn::Module& net, const std::vector<PipelineLayer>& layers,
               std::shared_ptr<Communicator> communicator, const PipelineOptions& options);

  // Trains on a batch, which every rank gives whole: adds gradients to .grad of the layers of this
  // rank, and returns the loss, 0-dim, without a graph, the same on all ranks. Collective. Throws
  // what PipelineEngine::step() throws, and ValueError where the batch cannot be cut, before
  // anything is sent.
  at::Tensor step(const at::Tensor& input, const at::Tensor& target, const PipelineLoss& loss) {
    return step_batch({for_first_stage(input)}, for_last_stage(target), of_one(loss));
  }

  // Runs the net of a pipeline in one process, in the caller's graph: forwards of micro-batches
  // now, their backwards within the caller's, all on the threads of the pipeline. Returns the
  // outputs, put together; the loss is computed outside. A batch with fewer rows than `chunks` has
  // fewer micro-batches. Hooks of parameters see the whole gradient once. Throws what a layer
  // threw, and TypeError for a pipeline on ranks.
  at::Tensor forward(const at::Tensor& input) {
    return run_pass(for_first_stage(input), checkpoint_);
  }

  // Computes the loss of a batch, keeping no graph. Collective.
  at::Tensor eval_step(const at::Tensor& input, const at::Tensor& target,
                       const PipelineLoss& loss) {
    return eval_batch({for_first_stage(input)}, for_last_stage(target), of_one(loss));
  }
  // Computes the outputs of a batch, keeping no graph: on the rank of the last stage, undefined
  // elsewhere. Collective.
  at::Tensor eval_step(const at::Tensor& input) {
    const Tensors outputs = outputs_of_batch({for_first_stage(input)});
    return outputs.empty() ? at::Tensor() : outputs.front();
  }

  // See HoldsStages: save_checkpoint() and load_checkpoint() take a pipeline.
  const std::unordered_map<std::string, std::string>& names_in_whole() const override {
    return names_in_whole_;
  }
  const std::shared_ptr<Communicator>& stage_ranks() const override { return all_; }

 private:
  using Layers = std::vector<PipelineLayer>;

  PipelineStageRequest request_of(int64_t stage, const Layers& layers, int64_t first);
  // Return a tensor on the device of that stage, where options name devices.
  at::Tensor for_first_stage(const at::Tensor& tensor) const {
    return devices_.empty() || !tensor.defined() ? tensor : tensor.to(devices_.front());
  }
  at::Tensor for_last_stage(const at::Tensor& tensor) const {
    return devices_.empty() || !tensor.defined() ? tensor : tensor.to(devices_.back());
  }

  Recomputation checkpoint_;
  std::vector<c10::Device> devices_;   // one per stage; empty if options name none
  std::shared_ptr<Communicator> all_;  // the ranks of all replicas
  std::unordered_map<std::string, std::string> names_in_whole_;
};

// Lists the layers of a Sequential. They do not keep it.
template <typename Net>
std::vector<PipelineLayer> layers_of(const Net& net) {
  std::vector<PipelineLayer> layers;
  auto layer = net->begin();
  for (const auto& named : net->named_children()) {
    layers.push_back({named.key(), named.value(), [own = *layer](at::Tensor value) mutable {
                        return own.forward(std::move(value));
                      }});
    ++layer;
  }
  return layers;
}

// Cuts a torch::nn::Sequential into stages, one or more per rank, and lets micro-batches flow
// through them (GPipe, Huang et al., 2019; torch.distributed.pipelining is the same in Python).
//
//   trireme::Context ctx = trireme::init();
//   trireme::Pipeline<> pipe(net, {.chunks = 8, .schedule = "1f1b"});
//   torch::optim::Adam optimizer(pipe->parameters());   // those of this rank's layers
//   auto loss = pipe->step(x, y, loss_fn);              // in place of forward and backward
//   optimizer.step();
//
// Layers take and return one tensor; what else they have for a later layer they stash() and pop()
// (skip.h). Any layer may ask for batch_input() and batch_target() (micro_batch_scope.h). Layers
// may share parameters, also between ranks (tied_parameters.h). The pipeline is a module that has
// the layers of this rank, under the names that they have in `net`. Every rank constructs it from
// the whole net, and may drop that afterwards: then the other layers are gone. Destroy it before
// the Context shuts down. What it costs, throws and guarantees: engine.h.
template <typename Net = torch::nn::Sequential>
class Pipeline : public torch::nn::ModuleHolder<PipelineImpl> {
 public:
  Pipeline(const Net& net, std::shared_ptr<Communicator> communicator,
           const PipelineOptions& options)
      : ModuleHolder(std::make_shared<PipelineImpl>(*net, layers_of(net), std::move(communicator),
                                                    options)) {}
  // Trains over the group of the Context that trireme::init() returned, or in this process alone.
  explicit Pipeline(const Net& net, const PipelineOptions& options = {})
      : Pipeline(net, options.ranks ? current_communicator() : nullptr, options) {}
  Pipeline(std::nullptr_t) : ModuleHolder(nullptr) {}  // NOLINT: converts, as in torch
};

}  // namespace trireme
