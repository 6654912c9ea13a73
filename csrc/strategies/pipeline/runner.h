#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/module/module_parameters.h>
#include <trireme/strategies/pipeline/gradients/tied_parameters.h>
#include <trireme/strategies/pipeline/schedule.h>
#include <trireme/strategies/pipeline/skip.h>
#include <trireme/strategies/pipeline/stage_function.h>
#include <trireme/strategies/pipeline/stage_loss.h>
#include <trireme/sync/deferred_sync.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

class LeafEdges;          // threads/leaf_edges.h
class UnlistedGradients;  // gradients/unlisted_gradients.h

// A stage that this rank holds.
struct PipelineStageRequest {
  int64_t stage = 0;
  std::string name = {};  // its layers, for messages: "layers 4..7"
  std::shared_ptr<StageFunction> function = nullptr;
  // The parameters whose .grad is scaled, without those of `strategies`.
  NamedParameters parameters = {};
  std::vector<std::pair<std::string, at::Tensor>> buffers = {};
  // Strategies around layers of the stage, beside those that deferred_sync_of() finds.
  std::vector<std::shared_ptr<DeferredSync>> strategies = {};
  // Whether a backward of the stage hands gradients to another place than .grad
  // (module/sends_gradients.h), so that nothing divides them afterwards.
  bool sends_gradients = false;
  // The leaves that take gradients in place of parameters; null for the parameters themselves.
  std::shared_ptr<const LeafEdges> leaves = nullptr;
};

struct PipelineEngineOptions {
  bool scale_grads = true;  // .grad and the loss are means over micro-batches; else sums
  // The tensors that stages stash and pop; those that one stage pops, in the order of pops.
  std::vector<PipelineSkip> skips = {};
  // The parameters that stages of several ranks share: their copies are kept equal.
  std::vector<TiedParameter> tied = {};
  // The ranks that hold the same stages in all replicas of the pipeline; null for one replica.
  std::shared_ptr<Communicator> replicas = nullptr;
  // What gradients become on links between replicas (grad/codes/compression.h); themselves if
  // absent.
  std::optional<Compression> compression = {};
  // Whether ranks are threads of one process: exceptions of stages then come out as they were
  // thrown, and the engine leaves strategies alone.
  bool on_threads = false;
  // Whether gradients of leaves that are no parameters of a stage are means, too; torch's schedules
  // leave them sums.
  bool scale_unlisted = true;
  // The gradients of such leaves, shared by all threads; null for ranks, which have their own.
  std::shared_ptr<UnlistedGradients> unlisted = nullptr;
};

// A stage's work in one step. Times are in milliseconds.
struct StageReport {
  int64_t stage = 0;
  double forward_ms = 0;
  double backward_ms = 0;   // B
  double input_ms = 0;      // I
  double weight_ms = 0;     // W
  double recompute_ms = 0;  // R
  // Waits by edge, "from stage 1" or "to stage 3", and "skips" for all that is stashed and popped.
  std::map<std::string, double> waiting_ms = {};
  int64_t messages = 0;  // sent
  int64_t bytes = 0;     // sent
  // The most micro-batches of which everything was kept at once: from F, or R, to B or W.
  int64_t peak_live = 0;
  int64_t peak_live_bytes = 0;  // bytes of the inputs kept, and of the outputs of those
};

struct PipelineReport {
  int64_t step = 0;
  double step_ms = 0;
  double bubble = 0;  // share of the step in which this rank computed nothing
  // The bubble of the schedule if all stages take as long as those of this rank did.
  double computed_bubble = 0;
  std::vector<StageReport> stages = {};
  // Under compression: what this rank sent to other replicas as codes (an all-reduce counts once),
  // and how long it took to code it. Else 0.
  int64_t sent_bytes = 0;
  double encode_ms = 0;
};

// [Note: passes]
//
// A pass is a forward whose loss the caller computes: the caller's graph begins at the outputs. A
// rank runs its forwards, and what its stages keep (KeptGraphs) lives on outside of it, so that
// other passes and steps may come before the backward, which runs the other actions. Parts of the
// loss that layers add go to the caller, and their gradients come from there.

struct KeptGraphs;  // engine.h

struct PassOptions {
  bool records = false;       // gradients
  bool takes_losses = false;  // else pipeline_loss() refuses parts of the loss
};

// A part of the loss: a value without a graph, which requires a gradient if the layer's value did.
struct PassLoss {
  int64_t stage = 0;
  int64_t micro_batch = 0;
  StageLoss part = {};
};

struct PassOutputs {
  std::vector<PipelineValue> outputs = {};     // one per micro-batch, of the rank of the last stage
  std::vector<PassLoss> losses = {};           // parts that layers added, in their order
  std::shared_ptr<KeptGraphs> kept = nullptr;  // if gradients are recorded
};

struct PassBackward {
  // Gradients of the last stage's outputs, per micro-batch; undefined if absent.
  std::vector<std::vector<at::Tensor>> gradients = {};
  // Gradients of the parts of the loss, by stage and micro-batch.
  std::map<std::pair<int64_t, int64_t>, std::vector<at::Tensor>> of_losses = {};
  bool keep_graph = false;
};

// Trains a module that was cut into stages: over ranks (PipelineEngine) or on threads of one
// process (threads/pipeline_threads.h). One thread at a time calls it, without the GIL.
class TRIREME_API PipelineRunner {
 public:
  virtual ~PipelineRunner() = default;

  // Makes the group work again after a step that failed; does nothing where none did. step() and
  // eval_step() begin with it. Collective. Throws c10::DistBackendError for a group that must be
  // rebuilt.
  virtual void recover() = 0;

  struct StepMode {
    bool synchronizes = true;  // false in steps that only accumulate
    // Whether any rank divides_losses(), or its caller asks for it. If callers do not know, ranks
    // ask each other: one more all-reduce of a number.
    std::optional<bool> divides_losses = {};
    bool asks_to_divide_losses = false;  // whether this rank's caller asks for it, if unset
    // A factor on gradients, as that of a GradScaler, and not on the loss that is returned. Equal
    // on all ranks.
    double loss_scale = 1;
  };
  // Trains: forwards and backwards of all micro-batches. `inputs` are those of the first stage, one
  // per micro-batch, and are given to its function as they are; a rank without that stage may give
  // none. Returns the loss of this replica of the pipeline, 0-dim, without a graph, the same on all
  // of its ranks. Gradients are added to .grad, and averaged over replicas, with what .grad held
  // before, if the step `synchronizes`. Collective.
  //
  // Throws on all ranks what went wrong on one: the texts name stage, rank and action. .grad is
  // then what it was before, but for parameters that a strategy averages, and the next step works,
  // unless the group must be rebuilt.
  virtual at::Tensor step(std::vector<PipelineValue> inputs, const StepMode& mode) = 0;
  at::Tensor step(std::vector<PipelineValue> inputs) { return step(std::move(inputs), StepMode()); }

  // Runs the forwards only, keeping no graph. With `has_loss` the loss comes back as from step();
  // else what the last stage returned, one per micro-batch, on its rank. Collective.
  struct Evaluation {
    at::Tensor loss = {};
    std::vector<PipelineValue> outputs = {};
  };
  virtual Evaluation eval_step(std::vector<PipelineValue> inputs, bool has_loss) = 0;

  // Returns whether a strategy averages gradients of stages of this rank: DistributedDataParallel,
  // ZeRO 2 or fully_shard.
  virtual bool has_strategies() const = 0;
  // Returns whether losses are to be divided by the number of micro-batches in place of gradients:
  // if it has_strategies(), or a backward of a stage of this rank sends gradients away.
  virtual bool divides_losses() const = 0;
  // Throws ValueError where a call would wait for itself, or for threads that are not there.
  virtual void expect_call() const {}

  // Returns the parameters of this rank that are copies of those of earlier stages.
  virtual std::vector<at::Tensor> later_copies() const = 0;
  // Returns what codes keep of this rank's gradients; nothing where nothing is compressed.
  virtual std::vector<KeptCodes> kept_codes() const { return {}; }

  virtual const PipelineSchedule& schedule() const = 0;
  // Returns where the exception that ended the last step came from, if from a stage of this rank:
  // "the forward of micro-batch 3 of stage 1 (layers 4..7)"; empty otherwise.
  virtual const std::string& raised_in() const = 0;
  // Returns what this rank did in the last step that ended well. Costs one simulation of the
  // schedule.
  virtual PipelineReport last_step() const = 0;
};

}  // namespace trireme
