#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/micro_batches.h>

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace trireme {

// Return this micro-batch's piece of an input, or of the target, that step() or eval_step() was
// given, in forwards of all stages and in the loss. The target is undefined in an eval_step()
// without one. Throw ValueError elsewhere, also where a checkpoint inside a layer repeats its
// forward in a backward, and for an input that does not exist.
TRIREME_API at::Tensor batch_input(size_t number = 0);
TRIREME_API at::Tensor batch_target();

// Lets batch_input() and batch_target() of this thread see a micro-batch while the scope lives. The
// batch outlives it.
class TRIREME_API MicroBatchScope {
 public:
  MicroBatchScope(const MicroBatches& batch, int64_t micro_batch);
  ~MicroBatchScope();
  MicroBatchScope(const MicroBatchScope&) = delete;
  MicroBatchScope& operator=(const MicroBatchScope&) = delete;

  struct State {
    const MicroBatches* batch = nullptr;
    size_t micro_batch = 0;
  };

 private:
  State before_;
};

}  // namespace trireme
