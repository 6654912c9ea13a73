#include <trireme/grad/flat_bucket.h>

#include <trireme/kernels/flatten.h>
#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace trireme {

bool FlatBucket::is_range(const at::Tensor& grad, size_t index) const {
  const Slot& slot = slots_[index];
  return buffer_.defined() && grads_may_alias_ && grad.layout() == at::kStrided &&
         grad.has_storage() &&
         grad.storage().unsafeGetStorageImpl() == buffer_.storage().unsafeGetStorageImpl() &&
         grad.storage_offset() == plan_.slots[index].offset && grad.scalar_type() == plan_.dtype &&
         grad.strides() == at::IntArrayRef(slot.strides) &&
         grad.sizes() == at::IntArrayRef(slot.sizes);
}

void FlatBucket::allocate() {
  const int64_t numel = plan_.numel + tail_numel_;
  buffer_ = own_ ? lazy_zeros(numel, plan_.dtype, plan_.device)
                 : at::empty({numel}, at::TensorOptions().dtype(plan_.dtype).device(plan_.device));
}

void FlatBucket::have_home() {
  if (!buffer_.defined()) allocate();
}

// Returns whether a tensor that was delivered may become .grad again: only we and its Python
// object, which has no other owner either, hold it, and it is unchanged.
bool FlatBucket::is_untouched(const at::Tensor& delivered, size_t slot) const {
  return torch::autograd::impl::is_tensor_stealable(delivered) && is_range(delivered, slot) &&
         delivered.unsafeGetTensorImpl()->autograd_meta() == nullptr;
}

// Counts the tensors over the buffer that only we hold, and each .grad over it, if we may write to
// it. Forgets delivered tensors that have other owners, too.
size_t FlatBucket::count_uses(bool writes_to_gradients) {
  size_t uses = 1;
  for (size_t i = 0; i < slots_.size(); ++i) {
    at::Tensor& delivered = delivered_[i];
    const bool is_in_place = slots_[i].origin == GradOrigin::kInPlace;
    if (is_in_place && writes_to_gradients) ++uses;
    if (!delivered.defined() || (is_in_place && delivered.is_same(parameter(i).grad()))) continue;
    if (is_untouched(delivered, i)) {
      ++uses;
    } else {
      delivered.reset();
    }
  }
  return uses;
}

void FlatBucket::begin_step(bool shadow) {
  Bucket::begin_step(shadow);
  if (buffer_.defined()) {
    // Another owner of the storage holds a gradient of an earlier step: leave it alone. So does a
    // .grad if this backward makes a graph: see [Note: gradients with a graph].
    const size_t our_uses = count_uses(!shadow && !at::GradMode::is_enabled());
    if (buffer_.storage().use_count() == our_uses) return;
  }
  delivered_.assign(slots_.size(), {});
  allocate();
  for (Slot& slot : slots_) {
    if (slot.origin == GradOrigin::kInPlace) slot.origin = GradOrigin::kForeign;
  }
}

// Returns whether the gradients of this bucket are the first ones of `earlier`, and lie alike.
bool FlatBucket::continues(const FlatBucket& earlier) const {
  const PlannedBucket& before = earlier.plan_;
  if (plan_.dtype != before.dtype || plan_.device != before.device) return false;
  if (slots_.size() > earlier.slots_.size() || grads_may_alias_ != earlier.grads_may_alias_)
    return false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (plan_.slots[i] != before.slots[i] || slots_[i].sizes != earlier.slots_[i].sizes ||
        slots_[i].strides != earlier.slots_[i].strides)
      return false;
  }
  return true;
}

bool FlatBucket::take_memory(Bucket& earlier) {
  auto* before = dynamic_cast<FlatBucket*>(&earlier);
  const int64_t numel = plan_.numel + tail_numel_;
  if (before == nullptr || !before->buffer_.defined() || before->buffer_.numel() < numel ||
      !continues(*before))
    return false;
  before->Bucket::begin_step(/*shadow=*/false);
  for (size_t i = slots_.size(); i < before->slots_.size(); ++i)
    if (before->slots_[i].origin == GradOrigin::kInPlace) return false;
  const size_t its_uses = before->count_uses(/*writes_to_gradients=*/true);
  if (before->buffer_.storage().use_count() != its_uses) return false;
  const at::Tensor whole = std::exchange(before->buffer_, {});
  if (own_) make_zero(whole, numel, whole.numel() - numel);
  buffer_ = range_of(whole, {numel}, {1}, 0);
  for (size_t i = 0; i < slots_.size(); ++i) delivered_[i] = std::move(before->delivered_[i]);
  before->delivered_.assign(before->slots_.size(), {});
  return true;
}

void FlatBucket::write(size_t index, const at::Tensor& grad, Write how) {
  const BucketSlot& slot = plan_.slots[index];
  if (slot.numel == 0) return;
  write_range(slot.offset, arranged(grad, slots_[index]), {0, slot.numel}, how);
}

void FlatBucket::complete(double scale) {
  if (!plan_.device.is_cpu()) return complete_on_device(scale);
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.packed) continue;
    slot.packed = true;
    const at::Tensor grad = contribution(i);
    if (grad.defined()) {
      if (slot.origin == GradOrigin::kInPlace && !slot.arrived) slot.saved = grad.clone();
      write(i, grad, {scale, /*add=*/false});
    } else {
      payload().narrow(0, plan_.slots[i].offset, plan_.slots[i].numel).zero_();
    }
  }
}

// One launch serves the whole bucket; gradients stay alive until then.
void FlatBucket::complete_on_device(double scale) {
  std::vector<at::Tensor> sources;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.packed = true;
    const at::Tensor grad = contribution(i);
    if (!grad.defined()) {
      sources.push_back(at::zeros({plan_.slots[i].numel}, buffer_.options()));
      continue;
    }
    if (slot.origin == GradOrigin::kInPlace && !slot.arrived) slot.saved = grad.clone();
    sources.push_back(arranged(grad, slot));
  }
  flatten(sources, payload(), scale);
  drop_taken();
}

Pending FlatBucket::reduce(Communicator& ranks, const std::string& label) {
  return ranks.all_reduce({buffer_}, ReduceOp::kSum, label);
}

void FlatBucket::deliver(size_t index, bool as_bucket_view) {
  const Slot& slot = slots_[index];
  at::Tensor& grad = parameter(index).mutable_grad();
  if (slot.origin == GradOrigin::kInPlace && is_range(grad, index)) return;
  const bool keeps_identity = grad.defined() && !(as_bucket_view && grads_may_alias_);
  if (!keeps_identity && grads_may_alias_) {
    at::Tensor& delivered = delivered_[index];
    if (!delivered.defined()) delivered = range(index);
    grad = delivered;
    return;
  }
  if (!keeps_identity)
    grad = at::empty_strided(slot.sizes, slot.strides, buffer_.options().dtype(slot.dtype));
  if (grad.layout() == at::kStrided) {
    grad.copy_(range(index));
  } else {
    grad = range(index).clone();  // a sparse .grad of a parameter that others filled densely
  }
}

at::Tensor FlatBucket::spread_sum(size_t slot) {
  have_home();
  return range(slot);
}

at::Tensor FlatBucket::own_sum(size_t slot, at::IntArrayRef sizes, at::IntArrayRef strides) const {
  return range_of(buffer_, sizes, strides, plan_.slots[slot].offset + own(slot).begin);
}

}  // namespace trireme
