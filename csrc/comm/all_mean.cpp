#include <trireme/comm/all_mean.h>

#include <ATen/ATen.h>

namespace trireme {

at::Tensor all_mean(Communicator& communicator, const at::Tensor& tensor) {
  const at::ScalarType dtype = at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)
                                   ? at::kFloat
                                   : tensor.scalar_type();
  at::Tensor mean = tensor.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true).contiguous();
  communicator.all_reduce({mean}, ReduceOp::kSum, "mean over ranks").wait();
  return mean.div_(communicator.world());
}

}  // namespace trireme
