#include <trireme/strategies/fsdp/owner_delivery.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace trireme {

at::Tensor shown_to_hooks(const at::Tensor& leaf, at::Tensor gradient) {
  if (torch::autograd::impl::get_autograd_meta(leaf) == nullptr) return gradient;
  for (const auto& hook : torch::autograd::impl::hooks(leaf)) gradient = (*hook)({gradient})[0];
  return gradient;
}

void OwnerDelivery::begin(BucketLayout& layout) {
  GradDelivery::begin(layout);
  partial_sums_.assign(layout.parameters().size(), {});
}

void OwnerDelivery::hold(const std::vector<bool>& held) {
  const auto lock = trigger_->lock();
  TORCH_INTERNAL_ASSERT(held.size() == partial_sums_.size());
  layout_->exclude(held);
}

void OwnerDelivery::defer_all_reduce(const std::vector<bool>& deferred) {
  const auto lock = trigger_->lock();
  TORCH_INTERNAL_ASSERT(deferred.size() == partial_sums_.size());
  deferred_ = owners_.has_replicas ? deferred : std::vector<bool>();
}

void OwnerDelivery::set_divide_factors(std::vector<double> factors) {
  const auto lock = trigger_->lock();
  TORCH_INTERNAL_ASSERT(factors.size() == partial_sums_.size());
  divide_factors_ = std::move(factors);
}

void OwnerDelivery::set_summed_callback(std::vector<bool> chosen, SummedCallback callback) {
  const auto lock = trigger_->lock();
  TORCH_INTERNAL_ASSERT(chosen.size() == partial_sums_.size());
  chosen_ = std::move(chosen);
  summed_callback_ = std::move(callback);
}

void OwnerDelivery::drop_accumulated() {
  const auto lock = trigger_->lock();
  for (const at::Tensor& parameter : layout_->parameters()) parameter.mutable_grad().reset();
  for (at::Tensor& partial : partial_sums_) partial.reset();
}

// Casts what was accumulated to the dtype in which it will be reduced, as torch does.
void OwnerDelivery::accumulated(size_t index) {
  at::Tensor& grad = parameter(index).mutable_grad();
  const ParameterInfo& info = layout_->infos()[index];
  drop_graph(grad);
  if (grad.defined()) grad = grad.to(info.reduce_dtype.value_or(info.gradient_dtype()));
}

// A bucket is waited for after those before it, on all ranks: so they come here in one order.
std::vector<bool> OwnerDelivery::take_sums(Bucket& bucket) {
  if (!owners_.has_replicas) return {};
  std::vector<bool> goes_on;
  for (size_t slot = 0; slot < bucket.plan().slots.size(); ++slot) {
    const size_t index = parameter_of(bucket, slot);
    at::Tensor own = bucket.own_sum(slot);
    at::Tensor& partial = partial_sums_[index];
    if (partial.defined()) own.add_(partial);
    partial = is_deferred(index) ? std::move(own) : at::Tensor();
    if (is_deferred(index)) parameter(index).mutable_grad().reset();  // the partial sum has it
    goes_on.push_back(!is_deferred(index));
  }
  return goes_on;
}

GradDelivery::DeliveryTime OwnerDelivery::delivery_time_of(size_t index) const {
  if (is_deferred(index)) return DeliveryTime::kHeldBack;
  return is_chosen(index) ? DeliveryTime::kAfterShown : DeliveryTime::kAtOnce;
}

// Returns the factor that a sum, of gradients that were divided by the divisor, still lacks.
double OwnerDelivery::last_scale(size_t index) const {
  const double factor = divide_factors_.empty() ? 0 : divide_factors_[index];
  return factor > 0 ? divisor_ / factor : 1;
}

void OwnerDelivery::add_own_sums(Bucket& bucket, std::vector<OwnSum>& sums) const {
  for (size_t slot = 0; slot < bucket.plan().slots.size(); ++slot) {
    const size_t index = parameter_of(bucket, slot);
    if (delivery_time_of(index) != DeliveryTime::kAfterShown) continue;
    OwnSum own{bucket.plan().slots[slot].parameter, bucket.own_sum(slot)};
    if (last_scale(index) != 1) own.values.mul_(last_scale(index));
    for (const ShardRange& range : owners_.own.plan->shards[index])
      own.longest = std::max(own.longest, range.numel);
    sums.push_back(std::move(own));
  }
}

bool OwnerDelivery::show_sums(const Buckets& buckets) {
  if (!summed_callback_) return false;
  std::vector<OwnSum> sums;
  for (const auto& bucket : buckets) add_own_sums(*bucket, sums);
  if (sums.empty()) return false;
  const SummedCallback callback = summed_callback_;  // a copy: it may take itself back
  callback(sums);
  return true;
}

at::ScalarType OwnerDelivery::dtype_of(size_t index) const {
  const at::Tensor& owner = owners_.leaves[index];
  const at::ScalarType planned =
      owners_.dtypes.empty() ? owner.scalar_type() : owners_.dtypes[index];
  const at::ScalarType now = owner.grad_dtype().value_or(planned);
  TORCH_CHECK(now == planned,
              error_text("fully_shard",
                         "got '" + layout_->infos()[index].name + "' with a grad_dtype of " +
                             c10::toString(now) + " since it was sharded, expected " +
                             c10::toString(planned),
                         {}, "Set grad_dtype before fully_shard."));
  return planned;
}

void OwnerDelivery::deliver(Bucket& bucket, size_t slot) {
  const size_t index = parameter_of(bucket, slot);
  const at::Tensor& owner = owners_.leaves[index];
  const double scale = is_chosen(index) ? 1 : last_scale(index);
  at::Tensor part = owner.numel() == 0 ? at::empty_like(owner)
                                       : bucket.own_sum(slot, owner.sizes(), owner.strides());
  if (scale != 1) part.mul_(scale);
  if (const at::ScalarType dtype = dtype_of(index); part.scalar_type() != dtype)
    part = part.to(dtype);
  part = shown_to_hooks(owner, std::move(part));
  at::Tensor& grad = owner.mutable_grad();
  grad.defined() ? void(grad.add_(part)) : void(grad = std::move(part));
  parameter(index).mutable_grad().reset();
}

bool OwnerDelivery::still_counts(size_t index, bool used) const {
  const bool is_held = layout_->is_excluded(index) && parameter(index).grad().defined();
  return is_held || (partial_sums_[index].defined() && used);
}

}  // namespace trireme
