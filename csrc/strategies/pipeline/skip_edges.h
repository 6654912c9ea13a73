#pragma once

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
// What a stage stashes goes straight to the stage that pops it, past those in between: by reference
// within a rank, else by a channel for each pair of stages, with one message per micro-batch
// onward, and one back where any of its tensors needs a gradient.
//
// * The popping stage puts what it receives behind the same node as its input (received_node.h), so
//   that one backward, in one piece or in two halves, yields the gradients of both.
// * The stashing stage hands gradients of skips to autograd in front of those of its outputs, and
//   those of the latest pop first: so they are added up as in one process, where a backward comes
//   to the last layer first.
// * A channel has a slot for each micro-batch: who stashes never waits. A stage pops after the
//   stages in between have run, so what they wait for is never held up.

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
  // Take what a stage stashed to those that pop it, and from there to the end of an input.
  void send_onward(const Message& message, std::vector<at::Tensor> stashed, StageReport& report);
  void receive_onward(const Message& message, StageInput& input);
  // Take gradients of what a stage popped to where it was stashed. They are undefined where none is
  // due.
  void send_back(const Message& message, std::vector<at::Tensor> gradients, StageReport& report);
  std::vector<at::Tensor> receive_back(const Message& message);
  // Say that what a stage received for a micro-batch is used no more.
  void done_with_input(int64_t stage);
  void done_with_gradients(const Message& message);
  // Say by pair of stages and micro-batch whether gradients of a pass go back.
  std::vector<std::vector<bool>> due() const;
  void set_due(const std::vector<std::vector<bool>>& due);
  // Drops what nobody has taken. After a failure, on all ranks.
  void abandon();
  void forget_before(int64_t step) {
    if (channels_) channels_->forget_before(step);
  }

 private:
  // Is what a stage stashes for another one.
  struct Edge {
    int64_t from = 0;
    int64_t to = 0;
    std::vector<std::string> names = {};
    bool is_local = false;
    TensorSender* onward = nullptr;
    TensorReceiver* arrives = nullptr;
    TensorSender* back = nullptr;
    TensorReceiver* returns = nullptr;
    // Hold by micro-batch whether gradients go back, and what is handed over within the rank.
    std::vector<bool> is_due = {};
    std::vector<StageInput> inputs = {};
    std::vector<std::vector<at::Tensor>> gradients = {};
  };

  std::vector<PipelineSkip> inner_;
  std::vector<Edge> edges_;  // those to the latest stage first, and in each the latest pop first
  std::unique_ptr<TensorChannels> channels_;
};

}  // namespace trireme
