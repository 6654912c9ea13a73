#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace trireme::remote {

// An owner asks autograd for gradients of parameters and inputs, and autograd then runs only what
// leads to these. A module of another process that a forward uses has no parameters here. So in
// such a forward each node that stands for one leads to a leaf of its own, an anchor, that is asked
// for as well. This collects those of the forwards of one thread, as long as it lives.
class TRIREME_API NestedAnchors {
 public:
  NestedAnchors();
  ~NestedAnchors();
  NestedAnchors(const NestedAnchors&) = delete;
  NestedAnchors& operator=(const NestedAnchors&) = delete;

  // Returns a new anchor if this thread collects any; else an undefined tensor.
  static at::Tensor make();
  const std::vector<at::Tensor>& anchors() const { return anchors_; }

 private:
  NestedAnchors* outer_;
  std::vector<at::Tensor> anchors_;
};

}  // namespace trireme::remote
