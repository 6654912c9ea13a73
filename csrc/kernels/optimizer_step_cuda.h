#pragma once

#include <trireme/kernels/optimizer_rows.h>

// This is torch's side of the CUDA kernels, compiled in every build, without CUDA headers.
namespace trireme::cuda {

// Says whether the kernels are in this build, for that GPU. If not, says so once.
bool can_step(c10::Device device);

// Launches on the current stream of the batch's device; grad_scale and found_inf are read there.
void step(const OptimizerBatch& batch, const AdamScalars& scalars, const GradScale& scale);
void step(const OptimizerBatch& batch, const SgdScalars& scalars, const GradScale& scale);

}  // namespace trireme::cuda
