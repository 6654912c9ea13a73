#pragma once

#include <c10/core/ScalarType.h>

#include <sstream>
#include <string>

// The common part of the checks of several operators.
namespace trireme {

// Returns whether kernels take a dtype, real or complex: float32, float64, float16 and bfloat16.
inline bool is_supported(at::ScalarType dtype) {
  const at::ScalarType real = c10::toRealValueType(dtype);
  return real == at::kFloat || real == at::kDouble || real == at::kHalf || real == at::kBFloat16;
}

// Joins all parts as a stream writes them, one behind the other.
template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace trireme
