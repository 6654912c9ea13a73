#include <trireme/strategies/remote/nested_anchors.h>

#include <ATen/ATen.h>

namespace trireme::remote {
namespace {
thread_local NestedAnchors* collecting = nullptr;
}  // namespace

NestedAnchors::NestedAnchors() : outer_(collecting) { collecting = this; }
NestedAnchors::~NestedAnchors() { collecting = outer_; }

at::Tensor NestedAnchors::make() {
  if (collecting == nullptr) return {};
  at::Tensor anchor = at::zeros({}).requires_grad_();
  collecting->anchors_.push_back(anchor);
  return anchor;
}

}  // namespace trireme::remote
