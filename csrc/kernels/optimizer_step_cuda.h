#pragma once

#include <trireme/kernels/optimizer_rows.h>

// Torch's side of the CUDA kernels, compiled in every build, without CUDA headers.
namespace trireme::cuda {

// Returns whether the kernels are in this build, for that GPU. If not, warns once.
bool can_step(c10::Device device);

// Launches on the current stream of the batch's device; grad_scale and found_inf are read there.
void step(const OptimizerBatch& batch, const AdamScalars& scalars, const GradScale& scale);
void step(const OptimizerBatch& batch, const SgdScalars& scalars, const GradScale& scale);

}  // namespace trireme::cuda
