#include <trireme/bindings/bindings.h>

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

namespace trireme {
namespace {

// Sends gradients of `leaf` into the node that has made `through`, of the same shape, instead of
// accumulating them: for a tensor that stands for another one. `leaf` stays a leaf and holds the
// node weakly: the caller must keep `through` alive.
void accumulate_through(const at::Tensor& leaf, const at::Tensor& through) {
  TORCH_INTERNAL_ASSERT(leaf.is_leaf() && through.grad_fn());
  using Weak = decltype(torch::autograd::AutogradMeta::grad_accumulator_);
  torch::autograd::impl::set_grad_accumulator(leaf, Weak(through.grad_fn()));
}

}  // namespace

void init_autograd(pybind11::module_& module) {
  module.def("accumulate_through", &accumulate_through, pybind11::arg("leaf"),
             pybind11::arg("through"));
}

}  // namespace trireme
