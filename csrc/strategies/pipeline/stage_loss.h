#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace trireme {

// Adds `weight` times `value`, a real number in a tensor, to the loss of the micro-batch whose
// forward runs on this thread: a layer of any stage may have a part of the loss, such as one that
// balances experts. Elsewhere it goes to the LossScope of this thread. Without one it throws
// ValueError where gradients are enabled, since the loss would be lost; else nothing asks for it. A
// recomputation in a backward does not count again; so a reentrant checkpoint, whose forward has no
// graph, leaves it without gradients.
TRIREME_API void pipeline_loss(const at::Tensor& value, double weight = 1);

struct StageLoss {
  at::Tensor value = {};
  double weight = 1;
};

// Directs pipeline_loss() of this thread to a list while it lives.
class TRIREME_API LossScope {
 public:
  explicit LossScope(std::vector<StageLoss>& losses);
  ~LossScope();
  LossScope(const LossScope&) = delete;
  LossScope& operator=(const LossScope&) = delete;

 private:
  std::vector<StageLoss>* before_;
};

}  // namespace trireme
