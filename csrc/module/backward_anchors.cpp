#include <trireme/module/backward_anchors.h>

#include <ATen/ATen.h>

namespace trireme {
namespace {
thread_local BackwardAnchors* collecting = nullptr;
}  // namespace

BackwardAnchors::BackwardAnchors() : outer_(collecting) { collecting = this; }
BackwardAnchors::~BackwardAnchors() { collecting = outer_; }

at::Tensor BackwardAnchors::make() {
  if (collecting == nullptr) return {};
  at::Tensor anchor = at::zeros({}).requires_grad_();
  collecting->anchors_.push_back(anchor);
  return anchor;
}

}  // namespace trireme
