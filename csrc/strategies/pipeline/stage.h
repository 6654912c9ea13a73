#pragma once

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/module/autograd_node.h>
#include <trireme/strategies/pipeline/runner.h>
#include <trireme/strategies/pipeline/skip.h>
#include <trireme/strategies/pipeline/split_backward.h>
#include <trireme/strategies/pipeline/stage_function.h>
#include <trireme/strategies/pipeline/stage_loss.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/edge.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// The inputs of a stage: the previous stage's outputs, then popped skips; and which of the tensors
// need a gradient.
struct StageInput {
  PipelineValue value;
  std::vector<bool> needs_gradient;
};

// Counts the bytes of tensors; undefined ones have none.
int64_t bytes_of(const std::vector<at::Tensor>& tensors);

// [Note: what a stage keeps]
//
// A forward leaves a graph that begins at a node of ours (received_node.h) and ends in the outputs.
// Until the backward of that micro-batch a stage keeps both ends: the node, and the edges of the
// outputs. It does not keep the outputs themselves. Autograd has saved what it needs of them, and
// the rest is free as soon as it was sent.
//
// A recomputed micro-batch has its graph from the forward on, with places for the saved tensors
// (activation/checkpoint_frame.h): so it is known which tensors need a gradient, and parts of the
// loss and skips are what they were. An R fills these places, for both halves of a backward; until
// then the stage keeps its inputs.

// Runs one stage, a micro-batch at a time: forward, then backward. One thread at a time.
class Stage {
 public:
  // A micro-batch's state between its forward and its backward.
  struct Live {
    NodePtr received;
    // Edges of what was stashed, then of the outputs; invalid where one needs no gradient.
    std::vector<torch::autograd::Edge> outputs;
    std::vector<StageLoss> losses;
    std::vector<at::Tensor> loss_gradients;                           // in a pass: one for each
    c10::intrusive_ptr<CheckpointFrame> frame;                        // if it is recomputed
    std::vector<std::pair<c10::VariableVersion, uint32_t>> versions;  // then: of its inputs
    bool has_loss = false;
    std::unique_ptr<SplitBackward> split;  // between the two halves
    bool is_live = false;
    bool wants_gradients = false;
    int64_t bytes = 0;
    int64_t returned = 0;  // bytes that count once it was recomputed
  };

  Stage(PipelineStageRequest request, const PipelineSchedule& schedule, StageSkips skips);

  int64_t index() const { return index_; }
  // Returns "stage 1 (layers 4..7)".
  std::string text() const;
  const std::string& name() const { return name_; }  // its layers, for messages
  bool is_first() const { return index_ == 0; }
  bool is_last() const { return index_ + 1 == stages_; }

  struct Step {
    bool trains = false;   // else it keeps no graph
    bool is_pass = false;  // the last stage gets gradients of its outputs, too, and has no loss
    bool takes_losses = false;  // keeps what layers have of the loss, in a pass
    double loss_gradient = 1;
  };
  void begin_step(const Step& step);
  // Computes a micro-batch, whose graph saves no tensors yet if it `is_recomputed`. `input` of the
  // first stage is left as it is. take_stashed() then returns what was stashed for other stages,
  // until the next forward.
  PipelineValue forward(int64_t micro_batch, StageInput input, bool is_recomputed);
  std::vector<at::Tensor> take_stashed() { return skips_.take_outgoing(); }
  bool has_skips() const { return !skips_.incoming.empty() || !skips_.outgoing.empty(); }
  size_t popped() const { return skips_.incoming.size(); }
  // Returns the parts of the loss that layers of the last forward added: values without a graph,
  // which require a gradient if they had one.
  std::vector<StageLoss> take_parts_of_loss();
  // Sets, in a pass, the gradients of those parts; undefined where none came.
  void take_loss_gradients(int64_t micro_batch, std::vector<at::Tensor> gradients);
  // Computes the loss of what forward() returned, and keeps it for backward(). The loss has its
  // graph.
  at::Tensor loss(int64_t micro_batch, const PipelineValue& output);
  // Calls layers and loss once more, for the backward that follows. Throws CheckpointError where
  // the second call differs, and c10::Error where layers had changed their input in place.
  void recompute(int64_t micro_batch);
  // Returns the edges at which the backward of a micro-batch begins, after forward() and loss().
  torch::autograd::edge_list graph_of(int64_t micro_batch) const;
  // Returns whether gradients of the outputs of a micro-batch are due, without those of skips.
  bool wants_gradients(int64_t micro_batch) const { return at(micro_batch).wants_gradients; }
  // Computes the gradients of weights and inputs. `gradients` are those of what was stashed, then,
  // where wanted, of the outputs: one each, undefined where none came. The last stage has its loss.
  // Returns the gradients of the inputs, then of what was popped; none where none is due.
  std::vector<at::Tensor> backward(int64_t micro_batch, const std::vector<at::Tensor>& gradients,
                                   bool keep_graph);
  // Do the same in two halves (split_backward.h); the first returns the gradients.
  std::vector<at::Tensor> backward_input(int64_t micro_batch,
                                         const std::vector<at::Tensor>& gradients);
  void backward_weight(int64_t micro_batch);
  // Move out, and back, what is kept of all micro-batches, between the halves of a pass.
  std::vector<Live> take_live();
  void put_live(std::vector<Live> live);
  // Drops all graphs.
  void abandon();

  // Milliseconds in which this rank waited for, or sent to, the stages beside this one, and those
  // with which it has skips.
  struct Waits {
    double from_before = 0;
    double to_next = 0;
    double from_next = 0;
    double to_before = 0;
    double skips = 0;
  };
  Waits& waits() { return waits_; }
  StageReport& report() { return report_; }
  // Returns the report with the waits by edge.
  StageReport finished_report() const;

 private:
  // The call of layers that a frame repeats.
  class Again;

  const Live& at(int64_t micro_batch) const { return live_[static_cast<size_t>(micro_batch)]; }
  Live& at(int64_t micro_batch) { return live_[static_cast<size_t>(micro_batch)]; }
  void count_bytes(Live& live, int64_t bytes);
  void count_live(Live& live);
  void call_again(int64_t micro_batch, PipelineValue input);
  // The edges at which a backward begins, and their gradients.
  struct Roots {
    torch::autograd::edge_list edges;
    std::vector<at::Tensor> gradients;
  };
  Roots roots_of(const Live& live, const std::vector<at::Tensor>& gradients) const;
  // Runs a whole backward, and returns the gradients of what was received.
  std::vector<at::Tensor> run_backward(const Live& live, const Roots& roots, bool keep_graph) const;
  void end(const Live& live);

  int64_t index_;
  int64_t stages_;
  std::string name_;
  std::shared_ptr<StageFunction> function_;
  std::shared_ptr<const LeafEdges> leaves_;
  StageSkips skips_;              // state of the forward that ran last
  std::vector<StageLoss> parts_;  // what that forward added to the loss
  Step step_;
  std::vector<Live> live_;
  int64_t live_count_ = 0;
  int64_t live_bytes_ = 0;
  StageReport report_;
  Waits waits_;
};

}  // namespace trireme
