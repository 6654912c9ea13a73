#pragma once

#include <cstdint>

namespace trireme::cuda {

// The dtypes that the kernels take, without torch's headers.
enum class Real : uint8_t { kFloat, kDouble, kHalf, kBFloat16 };

}  // namespace trireme::cuda
