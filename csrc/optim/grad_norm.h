#pragma once

#include <trireme/comm/communicator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace trireme {

// Gradients that lie together, on one device except for gradients offloaded to the CPU.
struct GradNormPart {
  std::vector<at::Tensor> gradients;
  c10::Device device{c10::kCPU};  // device of the engine that `sharded_over` uses
  // Its other ranks hold the rest of the gradients; null: every rank holds all of them.
  std::shared_ptr<Communicator> sharded_over;
  int64_t copies = 1;  // each gradient lies on so many of these ranks
  // Copies of gradients that other ranks count; they are only scaled.
  std::vector<at::Tensor> counted_elsewhere = {};
  // The ranks of a pipeline, which have other stages; null without a pipeline. Ranks without
  // parameters of a pipeline give a part without gradients.
  std::shared_ptr<Communicator> stages = nullptr;
};

// Returns the sum of the squares of the gradients that this rank counts, so that its sum over the
// `world` ranks that train a model together is that of whole gradients: 0-dim, fp64, on the device
// where they are. No collective. Throws ValueError for gradients of which other ranks than these
// have the rest.
TRIREME_API at::Tensor own_squares(const GradNormPart& part, int64_t world);

struct ClipOptions {
  double max_norm = 1;
  double norm_type = 2;  // also 0 (not over sharded gradients), negative and infinite ones
  bool error_if_nonfinite = false;
};

// Scales the gradients of any strategy in place, as torch.nn.utils.clip_grad_norm_, so that their
// common norm is `max_norm` at most, and returns the old norm, the same on all ranks. One
// all-reduce of one number per group that gradients are sharded over, and one per pipeline.
//
// Collective, if any part is sharded. Throws ValueError for a norm_type that it cannot reduce,
// c10::Error for a norm that is not finite, if that is asked for (on all ranks).
TRIREME_API at::Tensor clip_grad_norm_(const std::vector<GradNormPart>& parts,
                                       const ClipOptions& options);

}  // namespace trireme
