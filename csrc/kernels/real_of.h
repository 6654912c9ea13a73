#pragma once

#include <trireme/kernels/cuda/real.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace trireme::cuda {

// Translates a dtype that was checked before.
inline Real real_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Real::kFloat;
    case at::kDouble:
      return Real::kDouble;
    case at::kHalf:
      return Real::kHalf;
    case at::kBFloat16:
      return Real::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "a check let dtype ", dtype, " pass");
  }
}

}  // namespace trireme::cuda
