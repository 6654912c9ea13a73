#include <trireme/grad/grad_reducer.h>

#include <algorithm>
#include <utility>

// What differs where each rank keeps its shards of the gradients. See [Note: who owns a gradient's
// memory] in bucket.h.

namespace trireme {

void GradReducer::gradient_due(int64_t index) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kIdle) return;
  if (options_.arms_at_parameters && synchronize_) arm();
  // Without synchronizing it would be accumulated on what is reduced already.
  if (phase_ == Phase::kIdle) set_aside(static_cast<size_t>(index));
}

// With shards: if .grad holds a sum, its place is taken by what this rank accumulates.
void GradReducer::set_aside(size_t index) {
  at::Tensor& grad = parameters_[index].mutable_grad();
  if (!grad.defined()) set_aside_[index].reset();  // zeroed since
  if (!delivered_as_[index].is(grad)) return;
  set_aside_[index] = std::move(grad);
  grad.reset();
}

// As if the backward that was abandoned had never begun, for what had been reduced before.
void GradReducer::put_back() {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (set_aside_[i].defined()) parameters_[i].mutable_grad() = std::exchange(set_aside_[i], {});
}

void GradReducer::deliver(Bucket& bucket, size_t slot) {
  if (!options_.shards) return bucket.deliver(slot, options_.gradient_as_bucket_view);
  const auto index = static_cast<size_t>(bucket.plan().slots[slot].parameter);
  if (defers_ && places_[index].bucket >= 0) {  // not one that was left out of the layout
    summed_[index] = true;
    parameters_[index].mutable_grad().reset();
    return;
  }
  bucket.deliver_shard(slot, std::exchange(set_aside_[index], {}));
  watch_gradient(index);
}

void GradReducer::restore(Bucket& bucket, size_t slot) {
  const auto index = static_cast<size_t>(bucket.plan().slots[slot].parameter);
  // The sum is zeros; what was set aside moves to where its place is now.
  if (set_aside_[index].defined()) return deliver(bucket, slot);
  bucket.restore(slot);
}

void GradReducer::watch_gradient(size_t index) {
  const at::Tensor& grad = parameters_[index].grad();
  delivered_as_[index] = {};
  if (grad.defined())
    delivered_as_[index] = {WeakTensor(grad.getIntrusivePtr()),
                            grad.unsafeGetTensorImpl()->version_counter().current_version()};
}

std::vector<int64_t> GradReducer::changed_gradients(uint32_t allowed) const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> changed;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& grad = parameters_[i].grad();
    const Delivered& as = delivered_as_[i];
    const bool is_as_left =
        !grad.defined() ||
        (as.is(grad) &&
         grad.unsafeGetTensorImpl()->version_counter().current_version() - as.version <= allowed);
    if (!is_as_left || set_aside_[i].defined()) changed.push_back(static_cast<int64_t>(i));
  }
  return changed;
}

void GradReducer::accept_gradients() {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < parameters_.size(); ++i) watch_gradient(i);
}

void GradReducer::keep_own_gradients() {
  const std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) bucket.keep_own();
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
