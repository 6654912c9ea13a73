#pragma once

#include <c10/core/ScalarType.h>

#include <sstream>
#include <string>

// Holds what the checks of several operators share.
namespace trireme {

// The dtype may be real or complex: every kernel takes float32, float64, float16 and bfloat16.
inline bool is_supported(at::ScalarType dtype) {
  const at::ScalarType real = c10::toRealValueType(dtype);
  return real == at::kFloat || real == at::kDouble || real == at::kHalf || real == at::kBFloat16;
}

// Joins whatever can be written to a stream, one behind the other.
template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace trireme
