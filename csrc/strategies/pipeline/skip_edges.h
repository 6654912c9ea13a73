#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/strategies/pipeline/schedule.h>
#include <trireme/strategies/pipeline/skip.h>
#include <trireme/strategies/pipeline/stage.h>
#include <trireme/strategies/pipeline/stage_edges.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace trireme {

// [Note: skips]
//
// A stashed tensor goes straight to the stage that pops it, past those in between: by reference
// within a rank, else by a channel for each pair of stages, with one message per micro-batch
// onward, and one back where any of its tensors needs a gradient.
//
// * The popping stage puts what it receives behind the same node as its input (received_node.h), so
//   that one backward, in one piece or in two halves, yields the gradients of both.
// * The stashing stage hands gradients of skips to autograd in front of those of its outputs, in
//   reverse pop order, the order in which a single process accumulates them.
// * A channel has a slot for each micro-batch: a stage that stashes never waits. A stage pops after
//   the stages in between have run, so it never holds up what they wait for.

// Takes stashed tensors to the stages that pop them, and gradients back.
class SkipEdges {
 public:
  // Collective. All ranks give the same skips, those that one stage pops in the order of its pops.
  // Throws ValueError for a name that is given twice, a stage that does not exist, a pop in a stage
  // before that of the stash, and two stages that run micro-batches in different orders. The
  // communicator outlives it.
  SkipEdges(const PipelineSchedule& schedule, const std::vector<PipelineSkip>& skips,
            Communicator& communicator);

  // Returns what a stage stashes and pops. Tensors and gradients below are in these orders.
  StageSkips skips_of(int64_t stage) const;

  using Message = StageEdges::Message;
  // Send stashed tensors to the stages that pop them, and receive them there at the end of an
  // input.
  void send_onward(const Message& message, std::vector<at::Tensor> stashed, StageReport& report);
  void receive_onward(const Message& message, StageInput& input);
  // Send gradients of popped tensors to the stage that stashed them, and receive them there;
  // undefined where none is due.
  void send_back(const Message& message, std::vector<at::Tensor> gradients, StageReport& report);
  std::vector<at::Tensor> receive_back(const Message& message);
  // Declare that a stage uses what it received for a micro-batch no more.
  void done_with_input(int64_t stage);
  void done_with_gradients(const Message& message);
  // Get and set whether gradients of a pass go back, by pair of stages and micro-batch.
  std::vector<std::vector<bool>> due() const;
  void set_due(const std::vector<std::vector<bool>>& due);
  // Drops what no stage has taken. After a failure, on all ranks.
  void abandon();
  void forget_before(int64_t step) {
    if (channels_) channels_->forget_before(step);
  }

 private:
  // The skips from one stage to another.
  struct Edge {
    int64_t from = 0;
    int64_t to = 0;
    std::vector<std::string> names = {};
    bool is_local = false;
    TensorSender* onward = nullptr;
    TensorReceiver* arrives = nullptr;
    TensorSender* back = nullptr;
    TensorReceiver* returns = nullptr;
    // Per micro-batch: whether gradients go back, and what is handed over within the rank.
    std::vector<bool> is_due = {};
    std::vector<StageInput> inputs = {};
    std::vector<std::vector<at::Tensor>> gradients = {};
  };

  std::vector<PipelineSkip> inner_;
  std::vector<Edge> edges_;  // the one to the latest stage first, and in each the latest pop first
  std::unique_ptr<TensorChannels> channels_;
};

}  // namespace trireme
