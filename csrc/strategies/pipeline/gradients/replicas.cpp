#include <trireme/strategies/pipeline/gradients/replicas.h>

#include <trireme/common/error.h>
#include <trireme/grad/codes/senders.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace trireme {

using Tensors = std::vector<at::Tensor>;

PipelineReplicas::PipelineReplicas(std::shared_ptr<Communicator> communicator,
                                   const std::optional<Compression>& compression)
    : communicator_(std::move(communicator)) {
  if (!communicator_) return;
  if (compression && has_several_senders(*communicator_, between(*compression))) {
    auto coded = std::make_unique<CodedAverage>(communicator_, *compression);
    coded_ = coded.get();
    average_ = std::move(coded);
  } else {
    average_ = std::make_unique<GroupAverage>(communicator_, make_replica_sum(communicator_));
  }
}

void PipelineReplicas::set_parameters(const NamedParameters& parameters) {
  if (coded_ != nullptr) coded_->set_parameters(parameters);
}

std::vector<KeptCodes> PipelineReplicas::kept_codes() const {
  if (coded_ == nullptr) return {};
  return {coded_->kept_codes()};
}

void PipelineReplicas::abandon(const std::string& why) noexcept {
  if (exist()) communicator_->announce_failure(why);
  if (coded_ != nullptr) coded_->announce_failure(why);
  if (average_) average_->abandon();
}

void PipelineReplicas::spread(const Tensors& tensors) {
  if (!exist()) return;
  const at::NoGradGuard no_grad;
  Tensors moved;
  for (const at::Tensor& tensor : tensors) moved.push_back(tensor.detach().contiguous());
  communicator_->broadcast(moved, 0, "parameters and buffers of the first copy").wait();
  for (size_t i = 0; i < tensors.size(); ++i)
    if (!moved[i].is_alias_of(tensors[i])) tensors[i].copy_(moved[i]);
}

void PipelineReplicas::begin_step(int64_t step, bool averages) {
  if (!exist()) return;
  at::Tensor sum = at::full({1}, averages ? 1.0 : 0.0, at::kDouble).to(communicator_->device());
  communicator_->all_reduce({sum}, ReduceOp::kSum, "beginning of step " + std::to_string(step))
      .wait();
  const auto averaging = sum.item<double>();
  TORCH_CHECK_VALUE(
      averaging == 0 || averaging == static_cast<double>(communicator_->world()),
      error_text("pipeline",
                 c10::str("got a step that ", averaging, " of ", communicator_->world(),
                          " replicas of the pipeline average, and the others do not"),
                 communicator_->rank_of(), "Enter no_sync() on all replicas or none."));
  if (averages && coded_ != nullptr) coded_->begin_step();
}

void PipelineReplicas::average(const Tensors& parameters, const std::string& label) {
  Tensors gradients;
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  average_->begin(parameters, gradients,
                  {.found = "gradients used in " + label, .sums = "gradients of " + label});
}

void PipelineReplicas::finish() {
  if (!average_) return;
  average_->finish([](const at::Tensor& parameter, at::Tensor average) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined() || gradient.is_sparse() || average.is_sparse()) {
      gradient = std::move(average);
    } else if (!gradient.is_alias_of(average)) {
      gradient.copy_(average);
    }
  });
}

}  // namespace trireme
