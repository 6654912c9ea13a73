#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace trireme {

// Gives CPU memory for what is received before it is summed up: the last kKept blocks are used
// again once nobody holds them, so that they stay the same warm pages. One thread at a time.
class Scratch {
 public:
  static constexpr size_t kKept = 2;

  // Returns so many bytes, uninitialised.
  at::Tensor take_buffer(int64_t bytes);

 private:
  std::vector<at::Tensor> kept_;
};

}  // namespace trireme
