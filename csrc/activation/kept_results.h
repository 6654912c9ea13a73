#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace trireme {

// [Note: what a recomputation finds changed]
//
// A function of a checkpoint is called once more in the backward, and by then what it reads besides
// its inputs may be another: rows of a table that workers go on to step. So who reads such a thing
// does it by once_per_forward(): the forward keeps what it has read, and a recomputation is given
// it, in the same order. Checkpoints may lie in each other, and torch's in ours. All forwards that
// are under way keep a result, and any recomputation that is has it: so it does not matter which
// one lies in which.

// One call of a checkpoint's function that is under way on this thread.
class TRIREME_API CheckpointRun {
 public:
  virtual ~CheckpointRun();
  virtual bool is_recomputation() const = 0;
  virtual void keep(const std::vector<at::Tensor>& result) = 0;
  // Returns what the forward has kept next; nothing where it has kept no more.
  virtual std::vector<at::Tensor> take() = 0;
};
using CheckpointRuns = std::vector<std::unique_ptr<CheckpointRun>>;

// Say whether once_per_forward() has anything to do on this thread, and whether it may have, which
// is known at almost no cost.
TRIREME_API bool is_checkpoint_under_way();
TRIREME_API bool may_be_in_checkpoint();

// Returns what `read` returns: tensors without a graph. In a function of a checkpoint the forward
// keeps them until its graph goes, and a recomputation gets copies of what its forward has got.
TRIREME_API std::vector<at::Tensor> once_per_forward(
    const std::function<std::vector<at::Tensor>()>& read);

}  // namespace trireme
