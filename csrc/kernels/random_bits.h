#pragma once

#include <trireme/common/half.h>

#include <cstdint>

namespace trireme {

// Returns bits that look drawn by chance, of two numbers alone: on all machines the same.
TRIREME_INLINE uint32_t random_bits(uint32_t seed, uint32_t number) {
  uint32_t x = (number * 0x9e3779b9U) ^ seed;
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}

}  // namespace trireme
