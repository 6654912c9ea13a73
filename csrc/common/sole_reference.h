#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>

namespace trireme {

// Returns whether `tensor` is the only reference to its memory, so that its owner may write there.
// What other threads did with the memory before they dropped their references has happened before:
// torch counts references without an order.
inline bool is_sole_reference(const at::Tensor& tensor) {
  if (tensor.use_count() != 1 || !tensor.has_storage() || tensor.storage().use_count() != 1)
    return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

}  // namespace trireme
