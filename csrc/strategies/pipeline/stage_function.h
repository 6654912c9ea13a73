#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// The value that a stage takes or returns: its tensors, and a text from which the code that wrote
// it rebuilds the structure around them. The text is empty for one tensor.
struct PipelineValue {
  std::vector<at::Tensor> tensors = {};
  std::string text = {};
};

// The user's part of a stage. It is called on the thread that calls the PipelineEngine, and may
// throw.
class TRIREME_API StageFunction {
 public:
  virtual ~StageFunction() = default;

  // Computes a micro-batch. `input` is what the stage before returned, or, for the first stage,
  // what the caller of step() gave.
  virtual PipelineValue forward(int64_t micro_batch, PipelineValue input) = 0;
  // Returns the loss of a micro-batch, a 0-dim tensor. Only the last stage is asked.
  virtual at::Tensor loss(int64_t micro_batch, const PipelineValue& output) = 0;

  // Returns whether layers compute gradients of their weights themselves, later than autograd runs
  // them: begin_weights() is called after each backward, finish_weights() where a W is due. An I is
  // then a whole backward.
  virtual bool defers_weights() const { return false; }
  virtual void begin_weights(int64_t /*micro_batch*/) {}
  virtual void finish_weights(int64_t /*micro_batch*/) {}
};

}  // namespace trireme
