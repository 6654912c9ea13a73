#pragma once

#include <trireme/comm/tensor_channel.h>
#include <trireme/strategies/pipeline/schedule.h>
#include <trireme/strategies/pipeline/stage.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// What a stage sends or receives for a micro-batch.
struct EdgeMessage {
  int64_t step = 0;
  Stage& stage;  // it sends or receives
  int64_t micro_batch = 0;
  const std::string& label;  // the action, in words
};

// [Note: edges]
//
// The outputs of a stage go to the next stage, and a stashed tensor straight to the stage that pops
// it, past those in between: by reference within a rank, else by a channel each way, with one
// message per micro-batch onward, and one back where any of its tensors needs a gradient.
//
// * A stage puts all that it receives behind one node (received_node.h), so that one backward, in
//   one piece or in two halves, yields the gradients of all.
// * The stashing stage hands gradients of skips to autograd in front of those of its outputs, in
//   reverse pop order, the order in which a single process accumulates them.
// * A channel of skips has a slot for each micro-batch: a stage that stashes never waits. A stage
//   pops after the stages in between have run, so it never holds up what they wait for.

// Takes tensors from a stage to a later one, and their gradients back: the outputs, or the skips
// between the two.
class StageEdge {
 public:
  StageEdge(PipelineEdge stages, bool is_local, int64_t micro_batches);

  int64_t from() const { return stages_.from; }
  int64_t to() const { return stages_.to; }
  bool is_local() const { return is_local_; }  // both stages lie on one rank
  bool is_skip() const { return !names_.empty(); }
  // The skips, the latest pop first.
  const std::vector<std::string>& names() const { return names_; }
  void add_skip(const std::string& name) { names_.insert(names_.begin(), name); }
  // Sets the channel of one way; either end is null on a rank that has none.
  void connect(bool is_onward, TensorSender* sender, TensorReceiver* receiver);

  void send_onward(const EdgeMessage& message, PipelineValue value);
  StageInput receive_onward(const EdgeMessage& message);
  // Returns whether gradients of a micro-batch go back. Both ends know it from its tensors.
  bool is_due(int64_t micro_batch) const { return due_[static_cast<size_t>(micro_batch)]; }
  void send_back(const EdgeMessage& message, std::vector<at::Tensor> gradients);
  std::vector<at::Tensor> receive_back(const EdgeMessage& message);
  // Declare that a stage uses what it received for a micro-batch no more.
  void done_with_input();
  void done_with_gradients(int64_t micro_batch);

  // Get and set is_due() of a pass, by micro-batch.
  const std::vector<bool>& due() const { return due_; }
  void set_due(const std::vector<bool>& due) { due_ = due; }
  // Drops what no stage has taken.
  void abandon();

 private:
  PipelineEdge stages_;
  bool is_local_;
  std::vector<std::string> names_;
  TensorSender* onward_ = nullptr;
  TensorReceiver* arrives_ = nullptr;
  TensorSender* back_ = nullptr;
  TensorReceiver* returns_ = nullptr;
  // By micro-batch: is_due(), and what is handed over within the rank.
  std::vector<bool> due_;
  std::vector<StageInput> inputs_;
  std::vector<std::vector<at::Tensor>> gradients_;
};

}  // namespace trireme
