#include <trireme/strategies/zero/shard_delivery.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

// See [Note: who owns a gradient's memory] in grad/bucket.h.

namespace trireme {
namespace {

// Module.zero_grad(set_to_none=False) has written zeros: on all ranks, or they were zeros anyway.
bool is_zero(const at::Tensor& grad) { return !grad.any().item<bool>(); }

}  // namespace

ShardDelivery::Watched ShardDelivery::Watched::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {WeakTensor(tensor.getIntrusivePtr()),
          tensor.unsafeGetTensorImpl()->version_counter().current_version()};
}

bool ShardDelivery::Watched::is(const at::Tensor& tensor) const {
  return grad && tensor.defined() && grad->_unsafe_get_target() == tensor.unsafeGetTensorImpl();
}

bool ShardDelivery::Watched::is_unchanged(const at::Tensor& tensor, uint32_t allowed) const {
  return is(tensor) &&
         tensor.unsafeGetTensorImpl()->version_counter().current_version() - version <= allowed;
}

void ShardDelivery::begin(BucketLayout& layout) {
  GradDelivery::begin(layout);
  const size_t count = layout.parameters().size();
  delivered_as_.assign(count, {});
  accumulated_as_.assign(count, {});
  set_aside_.assign(count, {});
  was_changed_.assign(count, false);
}

// Sets a .grad aside that holds a sum; what this rank accumulates takes its place.
void ShardDelivery::set_aside(size_t index) {
  if (!parameter(index).requires_grad()) return;  // nothing will be accumulated
  at::Tensor& grad = parameter(index).mutable_grad();
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

void ShardDelivery::accumulated(size_t index) {
  if (set_aside_[index].defined()) accumulated_as_[index] = Watched::of(parameter(index).grad());
}

bool ShardDelivery::has_unseen(size_t index) const {
  const at::Tensor& grad = parameter(index).grad();
  return grad.defined() && !delivered_as_[index].is(grad);
}

void ShardDelivery::before_backward() {
  finalize_sums();
  for (size_t i = 0; i < set_aside_.size(); ++i) set_aside(i);
}

bool ShardDelivery::defers_step() const {
  return traits().may_defer_sums &&
         std::none_of(set_aside_.begin(), set_aside_.end(),
                      [](const at::Tensor& grad) { return grad.defined(); });
}

void ShardDelivery::begin_step(const Step& step) {
  transport_ = &step.transport;
  defers_ = transport_->defers_sums();
  summed_.assign(set_aside_.size(), false);
}

void ShardDelivery::deliver(Bucket& bucket, size_t slot) {
  const size_t index = parameter_of(bucket, slot);
  at::Tensor& grad = parameter(index).mutable_grad();
  if (defers_ && layout_->place_of(index).is_planned()) {
    summed_[index] = true;
    grad.reset();
    return;
  }
  drop_graph(grad);
  at::Tensor sum = bucket.spread_sum(slot);
  if (at::Tensor earlier = std::exchange(set_aside_[index], {}); earlier.defined()) {
    bucket.own_part(sum, slot).add_(bucket.own_part(earlier, slot));
    grad = std::move(earlier);  // keeps its identity
  }
  grad.defined() ? grad.set_data(sum) : void(grad = std::move(sum));
  delivered_as_[index] = Watched::of(grad);
}

void ShardDelivery::restore(Bucket& bucket, size_t slot) {
  // The sum is zeros; what was set aside moves to where its place is now.
  const size_t index = parameter_of(bucket, slot);
  if (set_aside_[index].defined()) return deliver(bucket, slot);
  const at::Tensor& grad = parameter(index).grad();
  const bool is_as_left = delivered_as_[index].is_unchanged(grad);
  bucket.restore(slot);
  if (is_as_left) delivered_as_[index] = Watched::of(grad);  // its values came back in place
}

// Puts .grad back as if the backward that was abandoned had never begun, where that can be had.
void ShardDelivery::abandon(const std::vector<bool>& is_delivered) {
  defers_ = false;
  for (size_t i = 0; i < set_aside_.size(); ++i) {
    at::Tensor& grad = parameter(i).mutable_grad();
    was_changed_[i] = was_changed_[i] || is_delivered[i];
    if (grad.defined() || !set_aside_[i].defined()) continue;
    grad = std::exchange(set_aside_[i], {});
    delivered_as_[i] = Watched::of(grad);
  }
}

std::vector<int64_t> ShardDelivery::changed_gradients(uint32_t allowed) const {
  const auto lock = trigger_->lock();
  std::vector<int64_t> changed;
  for (size_t i = 0; i < set_aside_.size(); ++i) {
    const at::Tensor& grad = parameter(i).grad();
    if (!grad.defined()) continue;
    const bool lacks_sum = set_aside_[i].defined() && accumulated_as_[i].is_unchanged(grad);
    const bool is_as_left = !was_changed_[i] && delivered_as_[i].is_unchanged(grad, allowed);
    if (lacks_sum || (!is_as_left && !is_zero(grad))) changed.push_back(static_cast<int64_t>(i));
  }
  return changed;
}

void ShardDelivery::keep_own_gradients() {
  const auto lock = trigger_->lock();
  for (const auto& bucket : layout_->buckets()) bucket->keep_own_gradients();
  for (size_t i = 0; i < set_aside_.size(); ++i)
    if (delivered_as_[i].is(parameter(i).grad()))
      delivered_as_[i] = Watched::of(parameter(i).grad());
}

void ShardDelivery::visit_sums(const SumVisitor& visit) {
  const auto lock = trigger_->lock();
  if (!std::exchange(has_sums_, false)) return;
  transport_->visit_sums([&](const SumPiece& sums) {
    if (summed_[static_cast<size_t>(sums.parameter)]) visit(sums);
  });
}

void ShardDelivery::finalize_sums() {
  const auto lock = trigger_->lock();
  if (!std::exchange(has_sums_, false)) return;
  defers_ = false;
  transport_->stop_deferring();
  for (size_t i = 0; i < summed_.size(); ++i) {
    const BucketPlace place = layout_->place_of(i);
    if (summed_[i])
      deliver(*layout_->buckets()[static_cast<size_t>(place.bucket)],
              static_cast<size_t>(place.slot));
  }
}

void ShardDelivery::drop_set_aside() {
  const auto lock = trigger_->lock();
  visit_sums([](const SumPiece&) {});
  set_aside_.assign(set_aside_.size(), {});
  was_changed_.assign(was_changed_.size(), false);
}

}  // namespace trireme
