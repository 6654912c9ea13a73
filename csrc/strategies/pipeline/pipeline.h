#pragma once

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/comm/launch/launch.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/optim/grad_norm.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/pipeline/deferred_batch_norm.h>
#include <trireme/strategies/pipeline/micro_batch_scope.h>
#include <trireme/strategies/pipeline/partition.h>
#include <trireme/strategies/pipeline/runner.h>
#include <trireme/strategies/pipeline/schedule_forms.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/schedule_text.h>
#include <trireme/strategies/pipeline/threads/call_turn.h>
#include <trireme/strategies/pipeline/threads/row_threads.h>
#include <trireme/sync/no_sync.h>

#include <c10/core/Device.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

struct PipelineOptions {
  // Whether stages lie on ranks. If not, all are in this process, which needs no Context: rows of
  // the schedule run on `threads` threads (threads/row_threads.h); 0: as many as `devices`, as
  // `balance` has stages, or, without these, as ATen has threads, and at most one per layer.
  bool ranks = true;
  int64_t threads = 0;
  // The device of each of these threads, to which the layers of its stages are moved. If empty,
  // each thread has that of its first parameter (devices_of_rows()). The batch is moved to the
  // first one, targets to that of the last stage.
  std::vector<c10::Device> devices = {};
  int64_t chunks = 1;                 // micro-batches of a step
  std::vector<int64_t> balance = {};  // layers per stage; as even as can be if empty
  std::string schedule = "gpipe";     // a name (schedule_forms.h), or a table with a line per rank
  std::optional<int64_t> stages_per_rank = {};
  int64_t dim = 0;  // along which batches are cut, as by torch::tensor_split, into `chunks` pieces
  bool scale_grads = true;
  // The number of pipelines: each has as many consecutive ranks, and trains on batches of its own.
  // Gradients are averaged over them (replicas.h).
  int64_t replicas = 1;
  // The names that layers stash() and pop(): `from` and `to` count layers.
  std::vector<PipelineSkip> skips = {};
  // The micro-batches that are recomputed: "never", "except_last", "always", "auto"
  // (schedule_recomputation.h).
  std::string checkpoint = "never";
  // Whether running statistics of BatchNorm are those of whole batches
  // (strategies/pipeline/deferred_batch_norm.h).
  bool deferred_batch_norm = false;
};

// Takes an output and a target, and returns a loss, 0-dim.
using PipelineLoss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

// Makes the schedule that options ask for. Throws ValueError.
TRIREME_API PipelineSchedule schedule_of(const PipelineOptions& options, int64_t ranks);
// The communicators of a rank of several pipelines.
struct PipelineRanks {
  std::shared_ptr<Communicator> communicator;  // the ranks of its pipeline
  std::shared_ptr<Communicator> replicas =
      nullptr;  // the ranks with the same stages; null for one copy
};
// Cuts ranks into as many pipelines as there are replicas. Without ranks there is one, whose
// communicator has no other rank. Collective. Throws ValueError where ranks are left over.
TRIREME_API PipelineRanks ranks_of_copy(std::shared_ptr<Communicator> all,
                                        const PipelineOptions& options);
// Returns how many rows the schedule of that many layers has. Throws ValueError for options that do
// not fit together.
TRIREME_API int64_t rows_of(const PipelineOptions& options, const PipelineRanks& ranks,
                            int64_t layers);
// Returns the device of each stage; none where options name none.
TRIREME_API std::vector<c10::Device> devices_of_stages(const PipelineOptions& options,
                                                       const PipelineSchedule& schedule);
// Makes the runner of the rows; on ranks, `stages` are those of this rank's row. Collective.
TRIREME_API std::unique_ptr<PipelineRunner> make_runner(const PipelineOptions& options,
                                                        const PipelineRanks& ranks,
                                                        PipelineSchedule schedule,
                                                        std::vector<PipelineStageRequest> stages,
                                                        PipelineEngineOptions engine_options);

// A pass over a whole batch.
struct PassRequest {
  const at::Tensor& input;
  int64_t dim = 0;
  int64_t chunks = 1;
  bool trains = true;
  Recomputation checkpoint = Recomputation::kNever;
  DeferredBatchNorms& batch_norms;
  CallTurn& turn;  // taken here; backwards take it again
};
// Runs the pass; see PipelineImpl::forward(). Sets `batch` to what forwards of stages may ask for,
// now and in recomputations.
TRIREME_API at::Tensor run_pass(RowThreads* threads, const PassRequest& request,
                                MicroBatches& batch);

// Returns the number of layers in front of each stage, and at the end that of all. Throws
// ValueError where `balance` does not add up to `layers`.
TRIREME_API std::vector<int64_t> stage_bounds(const PipelineOptions& options, int64_t layers,
                                              int64_t stages);

// Returns the same skips with stages in place of layers, in the order of pops. Throws ValueError
// for a layer that does not exist, and one that pops before the other stashes.
TRIREME_API std::vector<PipelineSkip> skips_of_stages(std::vector<PipelineSkip> skips,
                                                      const std::vector<int64_t>& bounds);

// Throws ValueError for layers that communicate with ranks that have other stages, or, in one
// process, with any others (SyncBatchNorm).
TRIREME_API void refuse_meetings_in_stages(const torch::nn::Module& layers,
                                           const PipelineOptions& options);

// Finds parameters and buffers that a module has under several names: returns each name but the
// first, with the first.
TRIREME_API std::unordered_map<std::string, std::string> names_in_whole(
    const torch::nn::Module& module);

// Returns the gradients of this rank's parameters, as its part of the norm over all stages. A
// parameter with two names counts once, and `copies` count on the ranks that have them first.
TRIREME_API GradNormPart gradients_of_stages(const std::vector<at::Tensor>& parameters,
                                             const std::vector<at::Tensor>& copies,
                                             std::shared_ptr<Communicator> communicator);

// See Pipeline below.
template <typename Net = torch::nn::Sequential>
class PipelineImpl : public torch::nn::Module, public HoldsStages {
 public:
  PipelineImpl(Net net, std::shared_ptr<Communicator> communicator, const PipelineOptions& options)
      : dim_(options.dim), chunks_(options.chunks), checkpoint_(recomputation(options.checkpoint)) {
    const PipelineRanks ranks = ranks_of_copy(communicator, options);
    communicator_ = ranks.communicator;
    turn_ = std::make_unique<CallTurn>(options.ranks ? communicator_ : nullptr);
    all_ = options.ranks ? std::move(communicator) : communicator_;
    const auto layers = static_cast<int64_t>(net->size());
    PipelineSchedule schedule = schedule_of(options, rows_of(options, ranks, layers));
    const std::vector<int64_t> bounds = stage_bounds(options, layers, schedule.stages);
    const auto named = net->named_children();
    devices_ = devices_of_stages(options, schedule);
    const std::vector<StageTensors> stages = tensors_of(named, bounds, schedule);
    names_in_whole_ = trireme::names_in_whole(*net);
    refuse_meetings_in_stages(*net, options);
    if (options.deferred_batch_norm) {
      DeferredBatchNorms all;  // other ranks refuse their layers here, too
      for (const auto& item : named) all.add(item.value(), item.key());
    }
    std::vector<PipelineStageRequest> requests;
    for (int64_t stage = 0; stage < schedule.stages; ++stage) {
      const int64_t row = schedule.stage_rank[static_cast<size_t>(stage)];
      if (options.ranks && row != communicator_->rank()) continue;
      const int64_t begin = bounds[static_cast<size_t>(stage)];
      const int64_t end = bounds[static_cast<size_t>(stage) + 1];
      PipelineStageRequest request;
      request.stage = stage;
      request.name = "layers " + std::to_string(begin) + ".." + std::to_string(end - 1);
      for (int64_t layer = begin; layer < end; ++layer) {
        const auto& item = named[static_cast<size_t>(layer)];
        if (!devices_.empty()) item.value()->to(devices_[static_cast<size_t>(stage)]);
        register_module(item.key(), item.value());
        for (const auto& buffer : item.value()->named_buffers())
          request.buffers.emplace_back(item.key() + "." + buffer.key(), buffer.value());
        if (options.deferred_batch_norm) batch_norms_.add(item.value(), item.key());
        request.sends_gradients = request.sends_gradients || sends_gradients(*item.value());
      }
      request.parameters.names = stages[static_cast<size_t>(stage)].names;
      request.parameters.tensors = stages[static_cast<size_t>(stage)].tensors;
      request.function = std::make_shared<Layers>(*this, net, begin, end);
      requests.push_back(std::move(request));
    }
    runner_ = make_runner(options, ranks, std::move(schedule), std::move(requests),
                          PipelineEngineOptions{
                              options.scale_grads,
                              skips_of_stages(options.skips, bounds),
                              find_tied(stages),
                              ranks.replicas,
                          });
  }

  // Trains over the group of the Context that trireme::init() returned, or in this process alone.
  explicit PipelineImpl(Net net, const PipelineOptions& options = {})
      : PipelineImpl(std::move(net), options.ranks ? current_communicator() : nullptr, options) {}

  // Trains on a batch, which every rank gives whole: adds gradients to .grad of the layers of this
  // rank, and returns the loss, 0-dim, without a graph, the same on all ranks. Collective. Throws
  // what PipelineEngine::step() throws, and ValueError where the batch cannot be cut, before
  // anything is sent.
  at::Tensor step(const at::Tensor& input, const at::Tensor& target, const PipelineLoss& loss) {
    const CallTurn::Guard turn(*turn_, *runner_);
    begin(input, target);
    loss_ = &loss;
    at::Tensor found = batch_norms_.whole_batch([&] {
      return runner_->step(batch_.inputs, {.synchronizes = synchronizes_,
                                           .asks_to_divide_losses = batch_.has_graph});
    });
    batch_.tell_batch();
    return found;
  }

  // Runs the net of a pipeline in one process, in the caller's graph: forwards of micro-batches
  // now, their backwards within the caller's, all on the threads of the rows. Returns the outputs,
  // put together; the loss is computed outside. A batch with fewer rows than `chunks` has fewer
  // micro-batches. Hooks of parameters see the whole gradient once. Throws what a layer threw, and
  // TypeError for a pipeline on ranks.
  at::Tensor forward(const at::Tensor& input) {
    auto* threads = dynamic_cast<RowThreads*>(runner_.get());
    const at::Tensor there = for_first_stage(input);
    return run_pass(threads,
                    {there, dim_, chunks_, this->is_training(), checkpoint_, batch_norms_, *turn_},
                    batch_);
  }

  // Steps while the guard lives only accumulate gradients in this replica of the pipeline; the
  // first one after it averages what has come together. All replicas do so alike.
  [[nodiscard]] NoSync no_sync() { return NoSync(synchronizes_); }

  // Computes the loss of a batch, keeping no graph. Collective.
  at::Tensor eval_step(const at::Tensor& input, const at::Tensor& target,
                       const PipelineLoss& loss) {
    const CallTurn::Guard turn(*turn_, *runner_);
    begin(input, target);
    loss_ = &loss;
    return run_forwards(/*has_loss=*/true).loss;
  }
  // Computes the outputs of a batch, keeping no graph: on the rank of the last stage, undefined
  // elsewhere. Collective.
  at::Tensor eval_step(const at::Tensor& input) {
    const CallTurn::Guard turn(*turn_, *runner_);
    begin(input, {});
    std::vector<at::Tensor> outputs;
    for (PipelineValue& value : run_forwards(/*has_loss=*/false).outputs)
      outputs.push_back(std::move(value.tensors.front()));
    return outputs.empty() ? at::Tensor() : at::cat(outputs, dim_);
  }

  // Scales the gradients of all ranks' layers to a common norm of at most `max_norm`; returns the
  // norm before, the same on all ranks. See optim/grad_norm.h. Collective: one all-reduce of one
  // number.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0,
                             bool error_if_nonfinite = false) {
    return trireme::clip_grad_norm_(gradients(), {max_norm, norm_type, error_if_nonfinite});
  }
  // Returns this rank's part of the gradients, for trireme::clip_grad_norm_() over several models.
  std::vector<GradNormPart> gradients() const {
    return {gradients_of_stages(this->parameters(), runner_->later_copies(), communicator_)};
  }

  // See HoldsStages: save_checkpoint() and load_checkpoint() take a pipeline.
  const std::unordered_map<std::string, std::string>& names_in_whole() const override {
    return names_in_whole_;
  }
  const std::shared_ptr<Communicator>& stage_ranks() const override { return all_; }

  const PipelineSchedule& schedule() const { return runner_->schedule(); }
  PipelineReport last_step() const { return runner_->last_step(); }

 private:
  // Runs some layers of the net.
  class Layers final : public StageFunction {
   public:
    Layers(PipelineImpl& pipe, Net net, int64_t begin, int64_t end)
        : pipe_(pipe), net_(std::move(net)), begin_(begin), end_(end) {}

    PipelineValue forward(int64_t micro_batch, PipelineValue input) override {
      const MicroBatchScope scope(pipe_.batch_, micro_batch);
      std::optional<DeferredBatchNorms::Observer> sees;
      if (!is_recomputing()) sees.emplace(pipe_.batch_norms_);
      at::Tensor value = std::move(input.tensors.at(0));
      for (int64_t i = begin_; i < end_; ++i)
        value = (net_->begin() + i)->forward(std::move(value));
      return {{std::move(value)}};
    }
    at::Tensor loss(int64_t micro_batch, const PipelineValue& output) override {
      const MicroBatchScope scope(pipe_.batch_, micro_batch);
      return (*pipe_.loss_)(output.tensors.at(0), batch_target());
    }

   private:
    PipelineImpl& pipe_;
    Net net_;
    int64_t begin_;
    int64_t end_;
  };

  void begin(const at::Tensor& input, const at::Tensor& target) {
    runner_->recover();
    batch_ = cut_batch({{for_first_stage(input)}, for_last_stage(target), dim_, chunks_},
                       *communicator_);
  }

  // Return a tensor on the device of that stage, where options name devices.
  at::Tensor for_first_stage(const at::Tensor& tensor) const {
    return devices_.empty() || !tensor.defined() ? tensor : tensor.to(devices_.front());
  }
  at::Tensor for_last_stage(const at::Tensor& tensor) const {
    return devices_.empty() || !tensor.defined() ? tensor : tensor.to(devices_.back());
  }

  PipelineRunner::Evaluation run_forwards(bool has_loss) {
    PipelineRunner::Evaluation found =
        batch_norms_.whole_batch([&] { return runner_->eval_step(batch_.inputs, has_loss); });
    batch_.tell_batch();
    return found;
  }

  // Lists the parameters of all stages, those of other ranks too.
  static std::vector<StageTensors> tensors_of(
      const torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>& named,
      const std::vector<int64_t>& bounds, const PipelineSchedule& schedule) {
    std::vector<StageTensors> stages;
    for (int64_t stage = 0; stage < schedule.stages; ++stage) {
      StageTensors& stage_tensors = stages.emplace_back();
      stage_tensors.rank = schedule.stage_rank[static_cast<size_t>(stage)];
      for (int64_t i = bounds[static_cast<size_t>(stage)];
           i < bounds[static_cast<size_t>(stage) + 1]; ++i) {
        const auto& item = named[static_cast<size_t>(i)];
        for (const auto& parameter : item.value()->named_parameters()) {
          stage_tensors.names.push_back(item.key() + "." + parameter.key());
          stage_tensors.tensors.push_back(parameter.value());
        }
      }
    }
    return stages;
  }

  int64_t dim_;
  int64_t chunks_;
  Recomputation checkpoint_;
  bool synchronizes_ = true;
  std::vector<c10::Device> devices_;   // one per stage; empty if options name none
  std::shared_ptr<Communicator> all_;  // the ranks of all replicas
  std::shared_ptr<Communicator> communicator_;
  std::unordered_map<std::string, std::string> names_in_whole_;
  std::unique_ptr<CallTurn> turn_;  // held by the call that uses batch_, loss_ and batch_norms_
  MicroBatches batch_;
  const PipelineLoss* loss_ = nullptr;
  DeferredBatchNorms batch_norms_;
  std::unique_ptr<PipelineRunner> runner_;
};

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
class Pipeline : public torch::nn::ModuleHolder<PipelineImpl<Net>> {
 public:
  using torch::nn::ModuleHolder<PipelineImpl<Net>>::ModuleHolder;
};

}  // namespace trireme
