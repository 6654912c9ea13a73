#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace trireme {

// The anchors made in the forwards of one thread, as long as this lives. The owner of a remote
// module asks autograd for gradients of parameters and inputs, and autograd then runs only the
// nodes that lead to these. A module of another process, or rows of a server, has no parameters
// here. So in such a forward its node leads to a leaf of its own, an anchor, for whose gradient the
// owner asks as well.
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
