#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/strategies/pipeline/schedule_check.h>
#include <trireme/strategies/pipeline/stage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// Takes values from stage to stage: to a stage of this rank by reference, to others by channels.
class StageEdges {
 public:
  // Collective. The communicator outlives it.
  StageEdges(const PipelineSchedule& schedule, Communicator& communicator);

  // The step, stage and micro-batch of a message.
  struct Message {
    int64_t step = 0;
    int64_t stage = 0;  // it sends or receives
    int64_t micro_batch = 0;
    const std::string& label;  // the action, in words
  };
  // Give outputs to the next stage, and gradients of inputs to the one before.
  void send_onward(const Message& message, const PipelineValue& outputs);
  void send_back(const Message& message, std::vector<at::Tensor> gradients);
  StageInput receive_onward(const Message& message);
  std::vector<at::Tensor> receive_back(const Message& message);

  // Declare that a stage uses what it received for a micro-batch no more.
  void done_with_input(int64_t stage);
  void done_with_gradients(int64_t stage);

  // Returns whether two stages lie on one rank; messages between others are counted as sent.
  bool is_local(int64_t from, int64_t to) const;
  // Drops what no stage has taken. After a failure, on all ranks.
  void abandon();
  void forget_before(int64_t step) { channels_->forget_before(step); }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);
  struct Ends {
    TensorSender* onward = nullptr;
    TensorSender* back = nullptr;
    TensorReceiver* from_before = nullptr;
    TensorReceiver* from_next = nullptr;
  };
  Ends& ends(int64_t stage) { return ends_[static_cast<size_t>(stage)]; }
  size_t place(int64_t stage, int64_t micro_batch) const {
    return static_cast<size_t>(stage * micro_batches_ + micro_batch);
  }

  int64_t micro_batches_;
  std::vector<int64_t> stage_rank_;
  std::unique_ptr<TensorChannels> channels_;
  std::vector<Ends> ends_;  // one per stage
  // Values that a stage of this rank gave to another one, by stage and micro-batch of the receiver.
  std::vector<StageInput> inputs_;
  std::vector<std::vector<at::Tensor>> gradients_;
};

}  // namespace trireme
