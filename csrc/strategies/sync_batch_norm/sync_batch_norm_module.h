#pragma once

#include <trireme/module/meets_ranks.h>
#include <trireme/strategies/sync_batch_norm/sync_batch_norm.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <ostream>

namespace trireme {

// The options of torch::nn::BatchNorm2d: num_features, eps, momentum, affine, track_running_stats.
using SyncBatchNormOptions = torch::nn::BatchNormOptions;

// torch::nn::BatchNorm1d, 2d or 3d over the batch of all ranks of a group; parameters and buffers
// have the same names, so either loads what the other saved. Inputs are [batch, channels, ...].
//
//   trireme::SyncBatchNorm norm(trireme::SyncBatchNormOptions(64).momentum(0.2),
//                               context.communicator());
//
// In training, forward and backward are collective: see BatchNormSync for the contract, what is
// thrown and the cost. In evaluation nothing is communicated. A clone uses the same communicator.
class TRIREME_API SyncBatchNormImpl
    : public torch::nn::NormImplBase<1, SyncBatchNormImpl, SyncBatchNormOptions>,
      public MeetsRanks {
 public:
  SyncBatchNormImpl(const SyncBatchNormOptions& options,
                    std::shared_ptr<Communicator> communicator);

  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  int64_t ranks_that_meet() const override { return sync_.communicator()->world(); }

 private:
  void _check_input_dim(const at::Tensor& input) override;
  double next_momentum() const;

  BatchNormSync sync_;
};

TORCH_MODULE(SyncBatchNorm);

}  // namespace trireme
