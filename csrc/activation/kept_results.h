#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace trireme {

// [Note: what a recomputation finds changed]
//
// A checkpoint's function is called once more in the backward, and data that it reads besides its
// inputs may have changed by then: rows of a table that workers go on to step. Code that reads such
// data does so through once_per_forward(): the forward keeps what it has read, and a recomputation
// gets it, in the same order. Checkpoints may be nested, also torch's in ours. All forwards under
// way keep a result, and any recomputation under way provides it, so the order of nesting does not
// matter.

// One call of a checkpoint's function that is under way on this thread.
class TRIREME_API CheckpointRun {
 public:
  virtual ~CheckpointRun();
  virtual bool is_recomputation() const = 0;
  virtual void keep(const std::vector<at::Tensor>& result) = 0;
  // Returns the next result that the forward has kept; empty if there is no further one.
  virtual std::vector<at::Tensor> take() = 0;
};
using CheckpointRuns = std::vector<std::unique_ptr<CheckpointRun>>;

// Return whether once_per_forward() has anything to do on this thread, and whether it may have,
// which costs almost nothing to find out.
TRIREME_API bool is_checkpoint_under_way();
TRIREME_API bool may_be_in_checkpoint();

// Returns what `read` returns: tensors without a graph. In a checkpoint's function the forward
// keeps them until its graph dies, and a recomputation gets copies of them.
TRIREME_API std::vector<at::Tensor> once_per_forward(
    const std::function<std::vector<at::Tensor>()>& read);

}  // namespace trireme
