#pragma once

#include <trireme/kernels/cuda/optimizer_table.h>
#include <trireme/kernels/cuda/real.h>

// The interface between torch's side (optimizer_step_cuda.cpp) and the kernels (optimizer_step.cu),
// which lie in another library: torch's side calls them through cuda_kernels.h.
namespace trireme::cuda {

struct OptimizerReals {
  Real param;
  Real grad;  // param, or kFloat
};

// Returns nullptr if the kernels run on the current device, else the reason; see why_no_flatten().
const char* why_no_optimizer_step();

// Launch once, asynchronously, on `stream` (a cudaStream_t), whose device must be the current one;
// the table is copied before they return. Return nullptr, or CUDA's text of the error.
const char* launch_adam(const OptimizerTable& table, OptimizerReals reals,
                        const AdamScalars& scalars, void* stream);
const char* launch_sgd(const OptimizerTable& table, OptimizerReals reals, const SgdScalars& scalars,
                       void* stream);

}  // namespace trireme::cuda
