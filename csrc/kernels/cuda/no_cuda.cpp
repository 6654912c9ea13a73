#include <trireme/kernels/cuda/flatten_launch.h>

// In place of the .cu files where nvcc is missing.
namespace trireme::cuda {

bool has_flatten() { return false; }

const char* launch_flatten(const FlattenTable&, FlattenMove, void*) {
  return "this build has no CUDA kernels";
}

}  // namespace trireme::cuda
