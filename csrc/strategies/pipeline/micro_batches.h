#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/batch_versions.h>
#include <trireme/strategies/pipeline/stage_function.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace trireme {

// A batch that every rank gives whole: one input or more. The target may be undefined.
struct BatchRequest {
  const std::vector<at::Tensor>& inputs;
  const at::Tensor& target;
  int64_t dim = 0;
  int64_t chunks = 1;
};

// The micro-batches of a batch: views of it.
struct MicroBatches {
  std::vector<PipelineValue> inputs;  // each has a piece of every input
  std::vector<at::Tensor> targets;    // none without a target
  std::shared_ptr<BatchVersions> versions = nullptr;
  bool has_graph = false;  // a tensor of the batch has a grad_fn: a step cannot divide its gradient

  // Tells the batch that layers may have changed micro-batches in place.
  void tell_batch() const {
    if (versions) versions->tell_batch();
  }
};

// Cuts a batch into `chunks` pieces as even as can be, the first ones larger. Collective: ranks
// compare how many rows they have, in a gather of a number. Throws ValueError, on all ranks alike,
// where they differ, and for fewer rows than pieces.
TRIREME_API MicroBatches cut_batch(const BatchRequest& batch, Communicator& communicator);

}  // namespace trireme
