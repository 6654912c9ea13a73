#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace trireme {

// Adds `weight` times `value`, a real number in a tensor, to the loss of the micro-batch whose
// forward runs on this thread: a layer of any stage may have a part of the loss, such as one that
// balances experts. In a forward whose loss is computed outside (Pipeline::forward()) the part goes
// to the LossScope of the thread that called it, and elsewhere to that of this thread. Without a
// LossScope it throws ValueError where gradients are enabled, since the part would be lost; else it
// is dropped. A recomputation in a backward does not count again; so a reentrant checkpoint, whose
// forward has no graph, leaves the part without gradients.
TRIREME_API void pipeline_loss(const at::Tensor& value, double weight = 1);

// Returns whether this thread repeats a forward within a backward.
TRIREME_API bool repeats_forward();

struct StageLoss {
  at::Tensor value = {};
  double weight = 1;
};

// Directs pipeline_loss() of this thread to a list while it lives. After a forward of a pipeline in
// one process the list has the parts of all micro-batches, one micro-batch after the other: weights
// are divided by the number of micro-batches where the pipeline's `scale_grads` says so, and
// gradients of the parts flow back with those of the outputs.
class TRIREME_API LossScope {
 public:
  explicit LossScope(std::vector<StageLoss>& losses);
  // Returns the list of this thread, or null.
  static std::vector<StageLoss>* current();
  ~LossScope();
  LossScope(const LossScope&) = delete;
  LossScope& operator=(const LossScope&) = delete;

 private:
  std::vector<StageLoss>* before_;
};

}  // namespace trireme
