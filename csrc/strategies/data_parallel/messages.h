#pragma once

#include <ATen/core/Tensor.h>

#include <sstream>
#include <string>

// Holds what the messages of several files here have in common.
namespace trireme {

inline constexpr const char* kDataParallelArea = "data_parallel";

inline std::string shape_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

}  // namespace trireme
