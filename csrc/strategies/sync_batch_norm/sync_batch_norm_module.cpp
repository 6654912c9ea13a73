#include <trireme/strategies/sync_batch_norm/sync_batch_norm_module.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {

SyncBatchNormImpl::SyncBatchNormImpl(const SyncBatchNormOptions& options,
                                     std::shared_ptr<Communicator> communicator)
    : NormImplBase(options), sync_(std::move(communicator)) {}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  if (is_training()) {
    const at::Tensor output = sync_.forward(
        {input, weight, bias, running_mean, running_var, next_momentum(), options.eps()});
    if (num_batches_tracked.defined()) num_batches_tracked.add_(1);
    return output;
  }
  _check_input_dim(input);
  return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                   /*training=*/!running_mean.defined(),
                                                   /*momentum=*/0.0, options.eps());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "trireme::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ')';
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  TORCH_CHECK_VALUE(
      input.dim() >= 2,
      error_text(
          "sync_batch_norm",
          "got an input of shape " + c10::str(input.sizes()) + ", expected (batch, channels, ...)",
          sync_.communicator()->rank_of(), "Give the input its batch and channel dimensions."));
}

// Without a momentum all batches weigh the same: 1/n for the n-th.
double SyncBatchNormImpl::next_momentum() const {
  if (options.momentum()) return *options.momentum();
  return num_batches_tracked.defined() ? 1.0 / (num_batches_tracked.item<double>() + 1.0) : 0.0;
}

}  // namespace trireme
