#include <trireme/module/module_replicas.h>

#include <torch/csrc/autograd/variable.h>

namespace trireme {

void share_tensor(const at::Tensor& master, at::Tensor& copy) {
  copy.set_data(master.detach());
  if (!master.is_inference())
    torch::autograd::impl::set_version_counter(copy,
                                               torch::autograd::impl::version_counter(master));
}

void follow_master(const at::Tensor& master, const at::Tensor& leaf) {
  if (leaf.requires_grad() != master.requires_grad())
    leaf.set_requires_grad(master.requires_grad());
  if (leaf.grad_dtype() != master.grad_dtype()) leaf.set_grad_dtype(master.grad_dtype());
}

}  // namespace trireme
