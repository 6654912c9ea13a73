#pragma once

#include <ATen/core/Tensor.h>

#include <sstream>
#include <string>

// The common parts of the messages of several files here.
namespace trireme {

inline constexpr const char* kDataParallelArea = "data_parallel";

inline std::string shape_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

}  // namespace trireme
