#include <trireme/strategies/pipeline/gradients/replicas.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {
namespace {

using Tensors = std::vector<at::Tensor>;

// Returns zeros as the gradient of a parameter that this copy did not use.
at::Tensor no_gradient(const at::Tensor& parameter, bool is_sparse) {
  if (!is_sparse) return at::zeros_like(parameter, at::MemoryFormat::Contiguous);
  return at::sparse_coo_tensor(parameter.sizes(),
                               parameter.options().layout(at::kSparse).requires_grad(false));
}

}  // namespace

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
                          " copies of the pipeline average, and the others do not"),
                 communicator_->rank_of(), "Enter no_sync() on all copies or none."));
}

void PipelineReplicas::average(const Tensors& parameters, const std::string& label) {
  if (parameters.empty()) return;
  const at::NoGradGuard no_grad;
  // Per parameter, how many copies have a gradient, and how many a sparse one.
  at::Tensor found = at::zeros({2, static_cast<int64_t>(parameters.size())}, at::kDouble);
  auto* here = found.mutable_data_ptr<double>();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    here[i] = gradient.defined() ? 1 : 0;
    here[parameters.size() + i] = gradient.defined() && gradient.is_sparse() ? 1 : 0;
  }
  found = found.to(communicator_->device());
  communicator_->all_reduce({found}, ReduceOp::kSum, "gradients used in " + label).wait();
  found = found.cpu();
  const auto* have = found.const_data_ptr<double>();
  const auto* have_sparse = have + parameters.size();
  Reduction dense;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (have[i] == 0) continue;
    const bool is_sparse = have_sparse[i] == have[i];
    at::Tensor gradient = parameters[i].grad();
    if (!gradient.defined()) gradient = no_gradient(parameters[i], is_sparse);
    if (is_sparse) {
      launch({{parameters[i]}, {gradient.coalesce()}}, label);
      continue;
    }
    dense.parameters.push_back(parameters[i]);
    dense.sums.push_back(gradient.is_sparse() ? gradient.to_dense() : gradient.contiguous());
  }
  if (!dense.sums.empty()) launch(std::move(dense), label);
}

void PipelineReplicas::launch(Reduction reduction, const std::string& label) {
  reduction.pending = across_->sum(reduction.sums, "gradients of " + label);
  in_flight_.push_back(std::move(reduction));
}

void PipelineReplicas::finish() {
  const at::NoGradGuard no_grad;
  for (Reduction& reduction : in_flight_) {
    reduction.pending.wait();
    for (size_t i = 0; i < reduction.sums.size(); ++i) {
      at::Tensor& sum = reduction.sums[i];
      at::Tensor& gradient = reduction.parameters[i].mutable_grad();
      sum.div_(communicator_->world());
      if (!gradient.defined() || gradient.is_sparse() || sum.is_sparse()) {
        gradient = std::move(sum);
      } else if (!gradient.is_alias_of(sum)) {
        gradient.copy_(sum);
      }
    }
  }
  in_flight_.clear();
}

}  // namespace trireme
