#include <trireme/comm/c10d/engine_options.h>
#include <trireme/comm/c10d/nccl_backend.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

// The one file that needs NCCL's and CUDA's headers (the wheels that torch depends on have them)
// and libtorch_cuda.
extern "C" TRIREME_API void trireme_make_nccl_backend(const trireme::NcclRequest& request,
                                                      c10::intrusive_ptr<c10d::Backend>& backend) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      request.store, static_cast<int>(request.where.rank), static_cast<int>(request.where.world),
      std::move(options));
}

extern "C" TRIREME_API void trireme_copy_nccl_options(const trireme::EngineOptions& options,
                                                      trireme::EngineOptions& copy) {
  copy = c10::make_intrusive<c10d::ProcessGroupNCCL::Options>(
      dynamic_cast<const c10d::ProcessGroupNCCL::Options&>(*options));
}
