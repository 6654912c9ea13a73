#include <trireme/kernels/cuda/cuda_kernels.h>

extern "C" TRIREME_API const trireme::cuda::CudaKernels* trireme_offer_cuda_kernels() {
  using namespace trireme::cuda;
  static constexpr CudaKernels kKernels = {&why_no_flatten, &launch_flatten, &why_no_optimizer_step,
                                           &launch_adam, &launch_sgd};
  return &kKernels;
}
