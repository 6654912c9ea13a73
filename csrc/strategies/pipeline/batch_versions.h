#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace trireme {

// [Note: versions of micro-batches]
//
// Autograd finds by a tensor's version that it was changed in place after it had been saved. Views
// share the version of what they are views of: so a layer that works in place on one micro-batch
// would spoil all others, which it does not touch. Each micro-batch has a version of its own, one
// for all that lies in one memory. Batch and micro-batches learn of each other's changes between
// calls: autograd then finds a batch that was saved and that a layer has changed, and a micro-batch
// that a graph keeps and that the caller has changed through the batch before the backward.

// The versions of the micro-batches of a batch. One thread at a time.
class TRIREME_API BatchVersions {
 public:
  // Returns a tensor over the memory of a piece, without a graph, with the version of that
  // micro-batch. Inference tensors and subclasses come back as they are.
  at::Tensor apart(const at::Tensor& piece, int64_t micro_batch);
  // Tells the batch that layers have changed micro-batches.
  void tell_batch();
  // Tells micro-batches that the batch was changed since tell_batch().
  void tell_micro_batches();

 private:
  struct Piece {
    at::Tensor of_batch;
    at::Tensor own;
    int64_t seen_of_batch = 0;
    int64_t seen_own = 0;
  };
  std::map<std::pair<const c10::StorageImpl*, int64_t>, c10::VariableVersion> versions_;
  std::vector<Piece> pieces_;
};

}  // namespace trireme
