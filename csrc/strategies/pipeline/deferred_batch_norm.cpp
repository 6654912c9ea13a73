#include <trireme/strategies/pipeline/deferred_batch_norm.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <algorithm>
#include <string_view>

namespace trireme {
namespace {

// The object to which layers on this thread report.
thread_local DeferredBatchNorms* observing = nullptr;

// Returns whether a module has running statistics that it updates by rules of its own.
bool is_other_batch_norm(const torch::nn::Module& module) {
  if (module.name().find("SyncBatchNorm") != std::string::npos) return true;
  const bool is_instance_norm =
      dynamic_cast<const torch::nn::InstanceNorm1dImpl*>(&module) != nullptr ||
      dynamic_cast<const torch::nn::InstanceNorm2dImpl*>(&module) != nullptr ||
      dynamic_cast<const torch::nn::InstanceNorm3dImpl*>(&module) != nullptr;
  return !is_instance_norm &&
         module.named_buffers(/*recurse=*/false).contains("num_batches_tracked");
}

// The arguments of torch::batch_norm().
enum Argument : size_t { kInput = 0, kRunningMean = 3, kTraining = 5, kArguments = 9 };

}  // namespace

template <typename Impl>
bool DeferredBatchNorms::add_if(const std::shared_ptr<torch::nn::Module>& module) {
  auto* norm = dynamic_cast<Impl*>(module.get());
  if (norm == nullptr) return false;
  const auto is_this = [&](const Norm& known) { return known.owner == module; };
  if (std::none_of(norms_.begin(), norms_.end(), is_this)) {
    norms_.push_back({module, &norm->options, &norm->running_mean, &norm->running_var,
                      &norm->num_batches_tracked});
  }
  return true;
}

void DeferredBatchNorms::add(const std::shared_ptr<torch::nn::Module>& module,
                             const std::string& name) {
  for (const auto& item : module->named_modules(name)) {
    const auto& inner = item.value();
    const bool is_known = add_if<torch::nn::BatchNorm1dImpl>(inner) ||
                          add_if<torch::nn::BatchNorm2dImpl>(inner) ||
                          add_if<torch::nn::BatchNorm3dImpl>(inner);
    if (is_known || !is_other_batch_norm(*inner)) continue;
    TORCH_CHECK_VALUE(false, error_text("pipeline",
                                        "got a " + inner->name() + " as '" + item.key() +
                                            "' to be deferred, expected BatchNorm1d, 2d or 3d",
                                        {}, "Replace it, or do not defer."));
  }
}

void DeferredBatchNorms::Norm::begin() {
  count = 0;
  mean = squares = at::Tensor();
  is_tracked = owner->is_training() && running_mean->defined();
}

void DeferredBatchNorms::Norm::set_aside() {
  mean_before = running_mean->clone();
  var_before = running_var->clone();
  tracked_before = *num_batches_tracked - 1;  // the layer has counted its forward by then
}

void DeferredBatchNorms::Norm::gather(const at::Tensor& input) {
  if (!mean_before.defined()) set_aside();
  const at::ScalarType dtype = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto [more_mean, more_var] =
      at::batch_norm_update_stats(input.detach().to(dtype), {}, {}, /*momentum=*/0.0);
  const int64_t more = input.numel() / input.size(1);
  const at::Tensor more_squares = more_var * more;
  const int64_t total = count + more;
  if (count == 0) {
    mean = more_mean;
    squares = more_squares;
  } else {
    const double share = static_cast<double>(more) / static_cast<double>(total);
    const at::Tensor apart = more_mean - mean;
    squares = squares + more_squares + apart.square() * (static_cast<double>(count) * share);
    mean = mean + apart * share;
  }
  count = total;
}

double DeferredBatchNorms::Norm::next_momentum() const {
  return options->momentum() ? *options->momentum() : 1.0 / (tracked_before.item<double>() + 1.0);
}

void DeferredBatchNorms::Norm::end(bool is_whole) {
  if (!mean_before.defined()) return;
  const at::NoGradGuard no_grad;
  const bool updates = is_whole && count > 0;
  if (updates) {
    const double momentum = next_momentum();
    const at::Tensor var = squares / std::max<int64_t>(count - 1, 1);
    mean_before = at::lerp(mean_before.to(mean.scalar_type()), mean, momentum);
    var_before = at::lerp(var_before.to(var.scalar_type()), var, momentum);
  }
  running_mean->copy_(mean_before);
  running_var->copy_(var_before);
  num_batches_tracked->copy_(updates ? tracked_before + 1 : tracked_before);
  mean = squares = mean_before = var_before = tracked_before = at::Tensor();
}

DeferredBatchNorms::Batch::Batch(DeferredBatchNorms& norms) : norms_(norms) {
  norms_.failure_ = nullptr;
  for (Norm& norm : norms_.norms_) norm.begin();
}

DeferredBatchNorms::Batch::~Batch() {
  for (Norm& norm : norms_.norms_) norm.end(is_whole);
}

DeferredBatchNorms::Observer::Observer(DeferredBatchNorms& norms) : before_(observing) {
  observing = &norms;
  const auto is_tracked = [](const Norm& norm) { return norm.is_tracked; };
  if (std::none_of(norms.norms_.begin(), norms.norms_.end(), is_tracked)) return;
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(see).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

DeferredBatchNorms::Observer::~Observer() {
  if (handle_ != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle_);
  observing = before_;
}

std::unique_ptr<at::ObserverContext> DeferredBatchNorms::see(const at::RecordFunction& function) {
  if (observing == nullptr || std::string_view(function.name()) != "aten::batch_norm")
    return nullptr;
  const auto arguments = function.inputs();
  if (arguments.size() != kArguments || !arguments[kRunningMean].isTensor() ||
      !arguments[kTraining].toBool())
    return nullptr;
  try {
    const at::NoGradGuard no_grad;
    const at::DisableRecordFunctionGuard unobserved;
    for (Norm& norm : observing->norms_) {
      if (norm.is_tracked && norm.running_mean->is_same(arguments[kRunningMean].toTensor()))
        norm.gather(arguments[kInput].toTensor());
    }
  } catch (...) {
    observing->failure_ = std::current_exception();
  }
  return nullptr;
}

}  // namespace trireme
