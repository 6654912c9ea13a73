#pragma once

#include <trireme/kernels/cuda/host_device_compat.h>

#include <cstdint>

namespace trireme::cuda {

// Returns the last of `count` items, which begin at ascending blocks, that begins at or before
// `block`: the item that the block works for. block_begin[0] is 0, and count at least 1.
TRIREME_HOST_DEVICE int32_t find_by_block(const int32_t* block_begin, int32_t count,
                                          int32_t block) {
  int32_t low = 0;
  int32_t high = count - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (block_begin[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace trireme::cuda
