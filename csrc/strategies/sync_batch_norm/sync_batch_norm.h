#pragma once

#include <trireme/comm/communicator.h>

#include <ATen/core/Tensor.h>

#include <memory>

namespace trireme {

struct BatchNormRequest {
  at::Tensor input;   // [batch, channels, ...]; half, bfloat16, float or double; may be empty
  at::Tensor weight;  // [channels], or undefined: not affine
  at::Tensor bias;
  at::Tensor running_mean;  // [channels], written in place; undefined: not tracked
  at::Tensor running_var;
  double momentum = 0.1;  // weight of the new value in a running statistic
  double eps = 1e-5;
};

// One batch normalization layer in training, whose batch is the batches of all ranks together:
// output, running statistics and gradients are those of that batch on one device. Both front doors
// wrap it. weight and bias get the sum over this rank's part, as any parameter does: DDP adds up
// the ranks.
//
// Collective, also for a rank whose part is empty, and so is the backward: every rank's loss has to
// depend on the output. Ranks may have different batch and spatial sizes.
//
// Cost per rank: forward one all-gather of 2 x channels + 1 numbers, backward one all-reduce of 2 x
// channels (8 or, for fp64, 16 bytes per channel each); the very first forward, and one after a
// change of channels or precision, compares the layers of the ranks by one more all-gather of 16
// bytes. No host synchronization on an accelerator but that one, and where a rank has fewer than 2
// values per channel. Saved for backward: the input, as for any batch normalization.
class TRIREME_API BatchNormSync {
 public:
  explicit BatchNormSync(std::shared_ptr<Communicator> communicator);

  // Returns the normalized batch, in the dtype and memory format of the input. One thread at a
  // time.
  //
  // Throws ValueError for an input without channel dimension or channels, for parameters of another
  // length, and on all ranks alike where ranks differ in channels or precision or have 1 value per
  // channel together; TypeError for dtypes that do not go together; DistBackendError.
  // Differentiating its gradients again throws NotImplementedError.
  at::Tensor forward(const BatchNormRequest& request);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  // The properties that must be equal on all ranks, or engines move messages of different lengths.
  struct Layout {
    int64_t channels = 0;
    at::ScalarType dtype = at::kFloat;
    bool operator==(const Layout&) const = default;
  };
  void agree_on(const Layout& layout, c10::Device device);

  std::shared_ptr<Communicator> communicator_;
  Layout agreed_;
};

}  // namespace trireme
