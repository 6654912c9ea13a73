#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/strategies/pipeline/schedule.h>
#include <trireme/strategies/pipeline/skip.h>
#include <trireme/strategies/pipeline/stage_edge.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace trireme {

// The edges of all stages (stage_edge.h), and the time that stages of this rank wait for them.
class StageEdges {
 public:
  // Collective. All ranks give the same skips, those that one stage pops in the order of its pops.
  // Throws ValueError for a name that is given twice, a stage that does not exist, a pop in a stage
  // before that of the stash, and two stages that run micro-batches in different orders. The
  // communicator outlives it.
  StageEdges(const PipelineSchedule& schedule, const std::vector<PipelineSkip>& skips,
             Communicator& communicator);

  // Returns what a stage stashes and pops. Tensors and gradients below are in these orders.
  StageSkips skips_of(int64_t stage) const;

  // Give outputs to the next stage and what the stage has stashed to those that pop it, and return
  // the outputs of the stage before, then what is popped.
  void send_onward(const EdgeMessage& message, PipelineValue outputs);
  StageInput receive_onward(const EdgeMessage& message);
  // Give gradients of what was received to the stages that sent it, and return those of what was
  // stashed, then of the outputs. Where none is due an output has none, what was stashed an
  // undefined one.
  void send_back(const EdgeMessage& message, std::vector<at::Tensor> gradients);
  std::vector<at::Tensor> receive_back(const EdgeMessage& message);
  // Declare that a stage uses what it received for a micro-batch no more.
  void done_with_input(const Stage& stage);
  void done_with_gradients(const EdgeMessage& message);

  // Get and set whether gradients of a pass go back, by edge and micro-batch.
  std::vector<std::vector<bool>> due() const;
  void set_due(const std::vector<std::vector<bool>>& due);
  // Drops what no stage has taken. After a failure, on all ranks.
  void abandon();
  void forget_before(int64_t step) { channels_->forget_before(step); }

 private:
  // The edges of a stage; null for one that the first or the last does not have.
  struct Ends {
    StageEdge* before = nullptr;
    StageEdge* next = nullptr;
    std::vector<StageEdge*> popped = {};
    std::vector<StageEdge*> stashed = {};
  };

  void add_skip(const PipelineSchedule& schedule, const PipelineSkip& skip);
  void open_channels(const PipelineSchedule& schedule, Communicator& communicator);
  Ends& ends(const Stage& stage) { return ends_[static_cast<size_t>(stage.index())]; }

  // The outputs of each stage but the last, then skips, the edge to the latest stage first.
  std::vector<StageEdge> edges_;
  std::vector<PipelineSkip> inner_;
  std::vector<Ends> ends_;  // of each stage
  std::unique_ptr<TensorChannels> channels_;
};

}  // namespace trireme
