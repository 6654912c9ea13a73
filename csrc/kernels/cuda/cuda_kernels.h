#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/cuda/flatten_launch.h>
#include <trireme/kernels/cuda/optimizer_launch.h>

namespace trireme::cuda {

// The functions of flatten_launch.h and optimizer_launch.h, which libtrireme_cuda offers.
struct CudaKernels {
  const char* (*why_no_flatten)();
  const char* (*launch_flatten)(const FlattenTable& table, FlattenMove move, void* stream);
  const char* (*why_no_optimizer_step)();
  const char* (*launch_adam)(const OptimizerTable& table, OptimizerReals reals,
                             const AdamScalars& scalars, void* stream);
  const char* (*launch_sgd)(const OptimizerTable& table, OptimizerReals reals,
                            const SgdScalars& scalars, void* stream);
};

// The one function that it exports; what it returns lives as long as the process.
using OfferCudaKernels = const CudaKernels*();
inline constexpr const char* kOfferCudaKernels = "trireme_offer_cuda_kernels";

}  // namespace trireme::cuda
