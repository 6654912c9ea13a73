#include <trireme/grad/grad_reducer.h>

#include <algorithm>
#include <utility>

// What differs where each rank keeps its shards of the gradients. See [Note: who owns a gradient's
// memory] in bucket.h.

namespace trireme {
namespace {

// Module.zero_grad(set_to_none=False) has written them: on all ranks, or they are zeros anyway.
bool is_zero(const at::Tensor& grad) { return !grad.any().item<bool>(); }

}  // namespace

GradReducer::Watched GradReducer::Watched::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {WeakTensor(tensor.getIntrusivePtr()),
          tensor.unsafeGetTensorImpl()->version_counter().current_version()};
}

bool GradReducer::Watched::is(const at::Tensor& tensor) const {
  return grad && tensor.defined() && grad->_unsafe_get_target() == tensor.unsafeGetTensorImpl();
}

bool GradReducer::Watched::is_unchanged(const at::Tensor& tensor, uint32_t allowed) const {
  return is(tensor) &&
         tensor.unsafeGetTensorImpl()->version_counter().current_version() - version <= allowed;
}

void GradReducer::gradient_due(int64_t index) {
  arm_with_siblings();
  const std::lock_guard lock(mutex_);
  // Sets the sum aside: a gradient would else be accumulated on it where no backward synchronizes.
  if (phase_ == Phase::kIdle && !has_owners()) set_aside(static_cast<size_t>(index));
}

void GradReducer::arm_with_siblings() {
  if (!options_.arms_at_parameters) return;
  const auto arm_one = [](GradReducer& one) {
    const std::lock_guard lock(one.mutex_);
    if (one.phase_ == Phase::kIdle && one.synchronize_) one.arm();
  };
  {
    const std::lock_guard lock(mutex_);
    if (phase_ != Phase::kIdle || !synchronize_) return;
  }
  for (const std::weak_ptr<GradReducer>& sibling : siblings_)
    if (const auto alive = sibling.lock()) arm_one(*alive);
  arm_one(*this);  // if it is not among them
}

void GradReducer::expect_none(std::vector<bool> unused) {
  const std::lock_guard lock(mutex_);
  unused_ = std::move(unused);
}

void GradReducer::arm_together(const std::vector<std::shared_ptr<GradReducer>>& reducers) {
  for (const std::shared_ptr<GradReducer>& one : reducers) {
    const std::lock_guard lock(one->mutex_);
    one->siblings_.assign(reducers.begin(), reducers.end());
  }
}

// Says whether this reducer may wait for other ranks while backward runs.
bool GradReducer::leads_siblings() const {
  if (siblings_.empty()) return true;
  const auto first = siblings_.front().lock();
  return first.get() == this;
}

// Sets a .grad aside that holds a sum; what this rank accumulates takes its place. Needs shards.
void GradReducer::set_aside(size_t index) {
  at::Tensor& grad = parameters_[index].mutable_grad();
  const Watched& expected =
      set_aside_[index].defined() ? accumulated_as_[index] : delivered_as_[index];
  if (grad.defined() && !expected.grad) return;  // nothing of it was ever reduced
  const bool is_changed = was_changed_[index] || !expected.is_unchanged(grad);
  was_changed_[index] = is_changed && grad.defined() && !is_zero(grad);
  if (is_changed && !was_changed_[index]) set_aside_[index].reset();  // the user has begun anew
  const bool holds_sum = delivered_as_[index].is(grad);
  delivered_as_[index] = {};
  if (!holds_sum) return;
  set_aside_[index] = std::move(grad);
  grad.reset();
}

void GradReducer::watch_accumulated(size_t index) {
  if (set_aside_[index].defined()) accumulated_as_[index] = Watched::of(parameters_[index].grad());
}

// Puts .grad back as if the backward that was abandoned had never begun, where that can be had.
void GradReducer::put_back() {
  if (has_owners()) return drop_accumulated();
  for (size_t i = 0; i < set_aside_.size(); ++i) {
    at::Tensor& grad = parameters_[i].mutable_grad();
    const bool is_delivered = i < is_delivered_.size() && is_delivered_[i];
    was_changed_[i] = was_changed_[i] || is_delivered;
    if (grad.defined() || !set_aside_[i].defined()) continue;
    grad = std::exchange(set_aside_[i], {});
    delivered_as_[i] = Watched::of(grad);
  }
}

void GradReducer::deliver(Bucket& bucket, size_t slot) {
  if (!options_.shards) {
    if (!shadow_ || shadow_delivers_) bucket.deliver(slot, options_.gradient_as_bucket_view);
    return;
  }
  const auto index = static_cast<size_t>(bucket.plan().slots[slot].parameter);
  if (has_owners()) {
    bucket.deliver_to(slot, options_.sharded_parameters[index],
                      is_chosen(index) ? 1 : last_scale(index));
    parameters_[index].mutable_grad().reset();
    return;
  }
  if (defers_ && places_[index].bucket >= 0) {  // not one that was left out of the layout
    summed_[index] = true;
    parameters_[index].mutable_grad().reset();
    return;
  }
  bucket.deliver_shard(slot, std::exchange(set_aside_[index], {}));
  delivered_as_[index] = Watched::of(parameters_[index].grad());
}

void GradReducer::restore(Bucket& bucket, size_t slot) {
  const auto index = static_cast<size_t>(bucket.plan().slots[slot].parameter);
  if (has_owners()) return;
  // The sum is zeros; what was set aside moves to where its place is now.
  if (set_aside_[index].defined()) return deliver(bucket, slot);
  bucket.restore(slot);
}

std::vector<int64_t> GradReducer::changed_gradients(uint32_t allowed) const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> changed;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& grad = parameters_[i].grad();
    if (!grad.defined()) continue;
    const bool lacks_sum = set_aside_[i].defined() && accumulated_as_[i].is_unchanged(grad);
    const bool is_as_left = !was_changed_[i] && delivered_as_[i].is_unchanged(grad, allowed);
    if (lacks_sum || (!is_as_left && !is_zero(grad))) changed.push_back(static_cast<int64_t>(i));
  }
  return changed;
}

void GradReducer::keep_own_gradients() {
  const std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) bucket.keep_own_gradients();
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (delivered_as_[i].is(parameters_[i].grad()))
      delivered_as_[i] = Watched::of(parameters_[i].grad());
}

void GradReducer::notice_changes() {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::kIdle) watch_parameters();
}

// Marks a parameter used whose hook was put on in the middle of the backward that has already come
// by.
void GradReducer::mark_seen_late(size_t index) {
  const at::Tensor& grad = parameters_[index].grad();
  if (options_.shards && grad.defined() && !delivered_as_[index].is(grad))
    used_.mark_used(static_cast<int64_t>(index));
}

void GradReducer::visit_sums(const std::function<void(const BucketStream::Sums&)>& visit) {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(has_sums_, false)) return;
  stream_->hand_out([&](const BucketStream::Sums& sums) {
    if (summed_[static_cast<size_t>(sums.parameter)]) visit(sums);
  });
}

void GradReducer::settle_sums() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(has_sums_, false)) return;
  defers_ = false;
  stream_->stop_deferring();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Place place = places_[i];
    if (summed_[i])
      deliver(buckets_[static_cast<size_t>(place.bucket)], static_cast<size_t>(place.slot));
  }
}

void GradReducer::drop_set_aside() {
  const std::lock_guard lock(mutex_);
  visit_sums([](const BucketStream::Sums&) {});
  set_aside_.assign(parameters_.size(), {});
  was_changed_.assign(parameters_.size(), false);
}

// Casts what was accumulated to the dtype in which it will be reduced, as torch does.
void GradReducer::widen_accumulated(size_t index) {
  at::Tensor& grad = parameters_[index].mutable_grad();
  const ParameterInfo& info = infos_[index];
  if (grad.defined()) grad = grad.to(info.reduce_dtype.value_or(info.dtype));
}

void GradReducer::hold(const std::vector<bool>& held) {
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(held.size() == parameters_.size());
  plan_is_stale_ = plan_is_stale_ || held != held_;
  held_ = held;
}

void GradReducer::set_divide_factors(std::vector<double> factors) {
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(factors.size() == parameters_.size());
  divide_factors_ = std::move(factors);
}

void GradReducer::reduce_accumulated() {
  {
    const std::lock_guard lock(mutex_);
    begin_backward(/*shadow=*/false);
  }
  collect_by_itself(/*may_learn=*/false);
}

void GradReducer::drop_accumulated() {
  const std::lock_guard lock(mutex_);
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  for (at::Tensor& partial : partial_sums_) partial.reset();
}

void GradReducer::set_armed_callback(std::function<void()> callback) {
  const std::lock_guard lock(mutex_);
  armed_ = std::move(callback);
}

void GradReducer::set_synchronize(bool synchronize) {
  const std::lock_guard lock(mutex_);
  synchronize_ = synchronize;
}

}  // namespace trireme
