#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme {

// Tensors as they were at a time: which objects, which memory, how often written. It owns none of
// them. Weak references keep what is freed meanwhile from being taken for what is made in its
// place.
class TRIREME_API SeenTensors {
 public:
  void add(const at::Tensor& tensor);
  void clear() { seen_.clear(); }
  size_t size() const { return seen_.size(); }

  // Returns whether the one that was added as number `place` is this tensor, not written since.
  // Writes through `.data` leave no trace.
  bool is_unchanged(size_t place, const at::Tensor& tensor) const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Seen {
    WeakTensor tensor;
    WeakStorage storage;
    const void* data;
    uint32_t version;
  };
  std::vector<Seen> seen_;
};

}  // namespace trireme
