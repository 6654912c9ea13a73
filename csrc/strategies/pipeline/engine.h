#pragma once

#include <trireme/comm/tensor_channel.h>
#include <trireme/module/module_parameters.h>
#include <trireme/strategies/pipeline/schedule.h>
#include <trireme/strategies/pipeline/stage_function.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// Is a stage that this rank holds.
struct PipelineStageRequest {
  int64_t stage = 0;
  std::string name = {};  // of its layers, for messages: "layers 4..7"
  std::shared_ptr<StageFunction> function = nullptr;
  NamedParameters parameters = {};  // .grad of these is scaled
};

struct PipelineEngineOptions {
  bool scale_grads = true;  // .grad and the loss are means over micro-batches; else sums
};

// Tells what a stage did in a step. Times are in milliseconds.
struct StageReport {
  int64_t stage = 0;
  double forward_ms = 0;
  double backward_ms = 0;  // B
  double input_ms = 0;     // I
  double weight_ms = 0;    // W
  std::map<std::string, double> waiting_ms = {};  // by edge: "from stage 1", "to stage 3"
  int64_t messages = 0;                           // sent
  int64_t bytes = 0;                              // sent
  int64_t peak_live = 0;                          // micro-batches that waited for their backward
  int64_t peak_live_bytes = 0;                    // of what the stage received and returned
};

struct PipelineReport {
  int64_t step = 0;
  double step_ms = 0;
  double bubble = 0;           // share of the step in which this rank computed nothing
  double computed_bubble = 0;  // what the schedule says of this rank's figures
  std::vector<StageReport> stages = {};
};

// Runs one row of a schedule: that of this rank. [Note: ...]
class TRIREME_API PipelineEngine {
 public:
  // Collective over the communicator, which has as many ranks as the schedule; all ranks give the
  // same schedule and options. Throws ValueError, on all ranks alike, where they do not, and for
  // stages that the schedule does not have on this rank.
  PipelineEngine(PipelineSchedule schedule, std::vector<PipelineStageRequest> stages,
                 std::shared_ptr<Communicator> communicator,
                 const PipelineEngineOptions& options);
  ~PipelineEngine();

  // Trains: forwards and backwards of all micro-batches. `inputs` are those of the first stage, one
  // per micro-batch; a rank without that stage may give none. Returns the loss, 0-dim, without a
  // graph, the same on all ranks. Collective.
  at::Tensor step(std::vector<PipelineValue> inputs);

  // Runs the forwards only, keeping no graph. With `has_loss` the loss comes back as from step();
  // else what the last stage returned, one per micro-batch, on its rank (no loss is computed).
  struct Evaluation {
    at::Tensor loss = {};
    std::vector<PipelineValue> outputs = {};
  };
  Evaluation eval_step(std::vector<PipelineValue> inputs, bool has_loss);

  const PipelineSchedule& schedule() const;
  PipelineReport last_step() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace trireme
