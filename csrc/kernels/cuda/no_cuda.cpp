#include <trireme/kernels/cuda/flatten_launch.h>
#include <trireme/kernels/cuda/optimizer_launch.h>

// In place of the .cu files where nvcc is missing.
namespace trireme::cuda {
namespace {

constexpr char kNoKernels[] = "this build has no CUDA kernels";

}  // namespace

const char* why_no_flatten() { return kNoKernels; }

const char* launch_flatten(const FlattenTable&, FlattenMove, void*) { return kNoKernels; }

const char* why_no_optimizer_step() { return kNoKernels; }

const char* launch_adam(const OptimizerTable&, OptimizerReals, const AdamScalars&, void*) {
  return kNoKernels;
}

const char* launch_sgd(const OptimizerTable&, OptimizerReals, const SgdScalars&, void*) {
  return kNoKernels;
}

}  // namespace trireme::cuda
