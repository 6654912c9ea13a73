#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace trireme {

// Memory of codes on the CPU that is used again from bucket to bucket and step to step, since to
// map fresh pages costs more than to code. It holds as much as one step had under way at a time.
// Not thread-safe.
class TRIREME_API CodeMemory {
 public:
  // Returns `numel` values, not initialized, that nobody else holds. They are taken back once all
  // tensors of that storage are gone.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  // Frees what no code has needed since the last call.
  void forget_unused();

 private:
  struct Entry {
    at::Tensor bytes;
    bool is_used = true;  // since forget_unused()
  };

  std::vector<Entry> entries_;
};

}  // namespace trireme
