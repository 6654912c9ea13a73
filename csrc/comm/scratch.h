#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace trireme {

// CPU memory for data that are received before they are summed up: the last kKept blocks are used
// again once nothing holds them, so that they stay the same warm pages. One thread at a time.
class Scratch {
 public:
  static constexpr size_t kKept = 2;

  // Returns so many bytes, uninitialised.
  at::Tensor take_buffer(int64_t bytes);

 private:
  std::vector<at::Tensor> kept_;
};

}  // namespace trireme
