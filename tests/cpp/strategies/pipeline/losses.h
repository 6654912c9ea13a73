#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace trireme::test {

// Returns the mean as a loop of one process adds it up.
inline at::Tensor mean_of(const std::vector<at::Tensor>& losses) {
  at::Tensor sum = losses.at(0).clone();
  for (size_t i = 1; i < losses.size(); ++i) sum.add_(losses[i]);
  return sum.div_(static_cast<int64_t>(losses.size()));
}

}  // namespace trireme::test
