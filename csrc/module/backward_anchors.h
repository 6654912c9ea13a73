#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace trireme {

// The owner of a remote module asks autograd for gradients of parameters and inputs, and autograd
// then runs only what leads to these. What sends its gradients elsewhere has no parameters here: a
// module of another process, rows of a server. So in such a forward each node that stands for one
// leads to a leaf of its own, an anchor, that is asked for as well. This collects those of the
// forwards of one thread, as long as it lives.
class TRIREME_API BackwardAnchors {
 public:
  BackwardAnchors();
  ~BackwardAnchors();
  BackwardAnchors(const BackwardAnchors&) = delete;
  BackwardAnchors& operator=(const BackwardAnchors&) = delete;

  // Returns a new anchor if this thread collects any; else an undefined tensor.
  static at::Tensor make();
  const std::vector<at::Tensor>& anchors() const { return anchors_; }

 private:
  BackwardAnchors* outer_;
  std::vector<at::Tensor> anchors_;
};

}  // namespace trireme
