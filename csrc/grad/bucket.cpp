#include <trireme/grad/bucket.h>

#include <trireme/common/error.h>
#include <trireme/kernels/flatten.h>
#include <trireme/kernels/span.h>
#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

std::vector<int64_t> slot_strides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  return at::detail::defaultStrides(parameter.sizes());
}

// A kernel's view of memory: complex numbers are pairs of reals.
at::ScalarType real_dtype(at::ScalarType dtype) { return c10::toRealValueType(dtype); }
int64_t real_numel(at::ScalarType dtype, int64_t numel) {
  return c10::isComplexType(dtype) ? 2 * numel : numel;
}

}  // namespace

Bucket::Bucket(PlannedBucket plan, const std::vector<at::Tensor>& parameters, int64_t tail_numel,
               OwnShards own)
    : plan_(std::move(plan)),
      parameters_(parameters),
      tail_numel_(tail_numel),
      own_(std::move(own)) {
  grads_may_alias_ = !plan_.sparse;
  for (const BucketSlot& planned : plan_.slots) {
    const at::Tensor& parameter = parameters_[static_cast<size_t>(planned.parameter)];
    grads_may_alias_ = grads_may_alias_ && parameter.scalar_type() == plan_.dtype;
    Slot slot;
    slot.offset = planned.offset;
    slot.numel = planned.numel;
    slot.sizes = parameter.sizes().vec();
    slot.strides = slot_strides(parameter);
    slots_.push_back(std::move(slot));
  }
  if (own_.scatters) plan_runs();
}

const at::Tensor& Bucket::parameter(size_t slot) const {
  return parameters_[static_cast<size_t>(plan_.slots[slot].parameter)];
}

at::Tensor Bucket::contribution(size_t index) const {
  return shadow_ || slots_[index].empty ? at::Tensor() : parameter(index).grad();
}

bool Bucket::is_range(const at::Tensor& grad, const Slot& slot) const {
  return buffer_.defined() && grads_may_alias_ && grad.layout() == at::kStrided &&
         grad.has_storage() &&
         grad.storage().unsafeGetStorageImpl() == buffer_.storage().unsafeGetStorageImpl() &&
         grad.storage_offset() == slot.offset && grad.scalar_type() == plan_.dtype &&
         grad.strides() == at::IntArrayRef(slot.strides) &&
         grad.sizes() == at::IntArrayRef(slot.sizes);
}

bool Bucket::holds_gradient_of(const at::Tensor& parameter) const {
  const at::Tensor& grad = parameter.grad();
  return grad.defined() && home().defined() && grad.layout() == at::kStrided &&
         grad.has_storage() &&
         grad.storage().unsafeGetStorageImpl() == home().storage().unsafeGetStorageImpl();
}

at::Tensor Bucket::range(size_t index) const {
  const Slot& slot = slots_[index];
  return range_of(home(), slot.sizes, slot.strides, plan_.slots[index].offset);
}

void Bucket::allocate() {
  if (own_.scatters) return allocate_runs();
  const int64_t numel = plan_.numel + tail_numel_;
  buffer_ = own_ ? lazy_zeros(numel, plan_.dtype, plan_.device)
                 : at::empty({numel}, at::TensorOptions().dtype(plan_.dtype).device(plan_.device));
}

void Bucket::have_home() {
  if (home().defined()) return;
  if (!own_.scatters) return allocate();
  whole_ = lazy_zeros(plan_.numel, plan_.dtype, plan_.device);
}

void Bucket::begin_step(bool shadow) {
  shadow_ = shadow;
  size_t in_place = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.packed = slot.arrived = slot.empty = false;
    slot.saved.reset();
    const at::Tensor& grad = parameter(i).grad();
    slot.origin = !grad.defined()        ? GradOrigin::kFresh
                  : is_range(grad, slot) ? GradOrigin::kInPlace
                                         : GradOrigin::kForeign;
    if (slot.origin == GradOrigin::kInPlace) ++in_place;
  }
  if (plan_.sparse || own_.scatters) {
    buffer_.reset();
    sums_.reset();
    if (whole_.defined() && whole_.storage().use_count() > 1) whole_.reset();
    return;
  }
  // Whoever else holds the storage holds a gradient of an earlier step: leave it alone.
  const size_t our_uses = 1 + (shadow ? 0 : in_place);
  if (buffer_.defined() && buffer_.storage().use_count() == our_uses) return;
  allocate();
  for (Slot& slot : slots_) {
    if (slot.origin == GradOrigin::kInPlace) slot.origin = GradOrigin::kForeign;
  }
}

at::Tensor Bucket::arranged(const at::Tensor& grad, const Slot& slot) {
  TORCH_CHECK(grad.sizes() == at::IntArrayRef(slot.sizes),
              error_text("grad_reducer",
                         "got a gradient of " + c10::str(grad.sizes()) + ", expected one of " +
                             c10::str(at::IntArrayRef(slot.sizes)) +
                             " as its parameter was when the forward began",
                         {}, "Give parameters other data before the forward."));
  const bool is_arranged = grad.layout() == at::kStrided &&
                           grad.strides() == at::IntArrayRef(slot.strides) && !grad.is_neg() &&
                           !grad.is_conj();
  if (is_arranged) return grad;
  const at::Tensor dense = grad.layout() == at::kStrided ? grad : grad.to_dense();
  return at::empty_strided(slot.sizes, slot.strides, dense.options()).copy_(dense);
}

void Bucket::write(size_t index, const at::Tensor& grad, double scale, bool add) {
  const Slot& slot = slots_[index];
  if (slot.numel == 0) return;
  if (own_.scatters) return write_runs(index, grad, scale, add);
  write_range(slot.offset, arranged(grad, slot), {0, slot.numel}, {scale, add});
}

void Bucket::write_range(int64_t offset, const at::Tensor& from, ShardRange range, Write how) {
  const auto* data = static_cast<const char*>(from.const_data_ptr()) +
                     range.begin * static_cast<int64_t>(from.element_size());
  auto* target = static_cast<char*>(buffer_.mutable_data_ptr()) +
                 offset * static_cast<int64_t>(buffer_.element_size());
  if (target == data && how.scale == 1) return;
  const int64_t numel = real_numel(plan_.dtype, range.numel);
  const Span into{target, real_dtype(plan_.dtype), numel};
  const ConstSpan source{data, real_dtype(from.scalar_type()), numel};
  how.add ? scaled_add(into, source, how.scale) : scaled_copy(into, source, how.scale);
}

void Bucket::gradient_arrived(size_t index, double scale) {
  Slot& slot = slots_[index];
  slot.arrived = true;
  if (plan_.sparse || !plan_.device.is_cpu() || slot.origin != GradOrigin::kFresh || shadow_)
    return;
  at::Tensor& grad = parameter(index).mutable_grad();
  if (!grad.defined()) return;  // a node returned no gradient
  write(index, grad, scale, /*add=*/slot.packed);
  slot.packed = true;
  grad.reset();
}

at::Tensor Bucket::take(size_t index) {
  Slot& slot = slots_[index];
  slot.packed = true;
  const at::Tensor grad = contribution(index);
  if (!grad.defined()) return {};
  if (slot.origin == GradOrigin::kInPlace && !slot.arrived) slot.saved = grad.clone();
  at::Tensor taken = arranged(grad, slot);
  if (slot.origin == GradOrigin::kFresh && slot.arrived) parameter(index).mutable_grad().reset();
  return taken;
}

void Bucket::complete(double scale) {
  if (plan_.sparse) return complete_sparse(scale);
  if (own_.scatters) return complete_runs(scale);
  if (!plan_.device.is_cpu()) return complete_on_device(scale);
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.packed) continue;
    slot.packed = true;
    const at::Tensor grad = contribution(i);
    if (grad.defined()) {
      if (slot.origin == GradOrigin::kInPlace && !slot.arrived) slot.saved = grad.clone();
      write(i, grad, scale, /*add=*/false);
    } else {
      payload().narrow(0, slot.offset, slot.numel).zero_();
    }
  }
}

// One launch for the whole bucket; gradients stay alive until then.
void Bucket::complete_on_device(double scale) {
  std::vector<at::Tensor> sources;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.packed = true;
    const at::Tensor grad = contribution(i);
    if (!grad.defined()) {
      sources.push_back(at::zeros({slot.numel}, buffer_.options()));
      continue;
    }
    if (slot.origin == GradOrigin::kInPlace && !slot.arrived) slot.saved = grad.clone();
    sources.push_back(arranged(grad, slot));
  }
  flatten(sources, payload(), scale);
  for (size_t i = 0; i < slots_.size(); ++i) {
    const bool is_taken = slots_[i].origin == GradOrigin::kFresh && !slots_[i].empty;
    if (is_taken && !shadow_) parameter(i).mutable_grad().reset();
  }
}

void Bucket::complete_sparse(double scale) {
  const at::Tensor& owner = parameter(0);
  const at::Tensor grad = contribution(0);
  slots_[0].packed = true;
  if (grad.defined()) {
    const at::Tensor sparse = grad.is_sparse() ? grad : grad.to_sparse(1);
    buffer_ = sparse.detach().mul(scale).to(plan_.dtype);
  } else {
    // One sparse dimension, as every sparse gradient has (Embedding, EmbeddingBag); engines compare
    // it.
    std::vector<int64_t> no_rows = slots_[0].sizes;
    no_rows[0] = 0;
    buffer_ = at::sparse_coo_tensor(at::empty({1, 0}, owner.options().dtype(at::kLong)),
                                    at::empty(no_rows, owner.options().dtype(plan_.dtype)),
                                    slots_[0].sizes);
  }
}

void Bucket::take_result(const at::Tensor& result) {
  if (plan_.sparse) {
    buffer_ = result;
    return;
  }
  at::Tensor own = payload();
  if (!result.is_alias_of(own)) own.copy_(result.view_as(own));
}

void Bucket::deliver(size_t index, bool as_bucket_view) {
  const Slot& slot = slots_[index];
  at::Tensor& grad = parameter(index).mutable_grad();
  if (plan_.sparse) {
    // A layer tied to the embedding may have made its gradient dense.
    const bool is_dense = grad.defined() && !grad.is_sparse();
    const at::Tensor reduced = is_dense ? buffer_.to_dense() : buffer_;
    if (grad.defined() && slot.origin != GradOrigin::kFresh) {
      grad.copy_(reduced);
    } else {
      grad = reduced.to(parameter(index).scalar_type());
    }
    return;
  }
  if (slot.origin == GradOrigin::kInPlace && is_range(grad, slot)) return;
  const bool keeps_identity = grad.defined() && !(as_bucket_view && grads_may_alias_);
  if (!keeps_identity) {
    grad = grads_may_alias_
               ? range(index)
               : at::empty_strided(slot.sizes, slot.strides, parameter(index).options());
    if (grads_may_alias_) return;
  }
  if (grad.layout() == at::kStrided) {
    grad.copy_(range(index));
  } else {
    grad = range(index).clone();  // a sparse .grad of a parameter that others filled densely
  }
}

at::Tensor Bucket::own_part(const at::Tensor& grad, size_t index) const {
  const ShardRange own = own_.of(plan_.slots[index]);
  return grad.view({-1}).narrow(0, own.begin, own.numel);
}

void Bucket::deliver_shard(size_t index, const at::Tensor& earlier) {
  at::Tensor& grad = parameter(index).mutable_grad();
  have_home();
  at::Tensor reduced = range(index);
  if (own_.scatters) own_part(reduced, index).copy_(own_sum(index));
  if (earlier.defined()) {
    own_part(reduced, index).add_(own_part(earlier, index));
    grad = earlier;
  }
  grad.defined() ? grad.set_data(reduced) : void(grad = std::move(reduced));
}

at::Tensor Bucket::own_sum(size_t index) const {
  const ShardRange own = this->own(index);
  const int64_t begin = own_.scatters ? 0 : own.begin;
  return range_of(own_.scatters ? sums_ : buffer_, {own.numel}, {1}, slots_[index].offset + begin);
}

void Bucket::deliver_to(size_t index, const at::Tensor& owner, double scale) {
  const int64_t begin = own_.scatters ? 0 : own_.of(plan_.slots[index]).begin;
  at::Tensor part = owner.numel() == 0 ? at::empty_like(owner)
                                       : range_of(own_.scatters ? sums_ : buffer_, owner.sizes(),
                                                  owner.strides(), slots_[index].offset + begin);
  if (scale != 1) part.mul_(scale);
  if (part.scalar_type() != owner.scalar_type()) part = part.to(owner.scalar_type());
  at::Tensor& grad = owner.mutable_grad();
  grad.defined() ? void(grad.add_(part)) : void(grad = std::move(part));
}

std::vector<ShardRange> Bucket::own_ranges() const {
  std::vector<ShardRange> ranges;
  const auto add = [&](ShardRange next) {
    const bool joins = !ranges.empty() && ranges.back().begin + ranges.back().numel == next.begin;
    if (joins) {
      ranges.back().numel += next.numel;
    } else if (next.numel > 0) {
      ranges.push_back(next);
    }
  };
  for (const BucketSlot& slot : plan_.slots) {
    const ShardRange own = own_.of(slot);
    add({slot.offset + own.begin, own.numel});
  }
  add({plan_.numel, tail_numel_});
  return ranges;
}

void Bucket::keep_own() { own_.scatters ? buffer_.reset() : keep_own_gradients(); }

void Bucket::keep_own_gradients() {
  const at::Tensor& lazy = home();
  if (!lazy.defined()) return;
  int64_t end = 0;
  for (const ShardRange& own : own_ranges()) {
    make_zero(lazy, end, own.begin - end);
    end = own.begin + own.numel;
  }
  make_zero(lazy, end, lazy.numel() - end);
}

void Bucket::restore(size_t index) {
  Slot& slot = slots_[index];
  if (slot.saved.defined()) parameter(index).mutable_grad().copy_(slot.saved);
  slot.saved.reset();
}

void Bucket::adopt_range(size_t index, const Bucket& earlier) {
  have_home();
  at::Tensor& grad = parameter(index).mutable_grad();
  if (!grads_may_alias_ || !earlier.grads_may_alias_) return;
  const at::Tensor place = range(index);
  place.copy_(grad);
  grad.set_data(place);
}

at::Tensor Bucket::payload() const {
  return plan_.sparse || own_.scatters ? buffer_ : buffer_.narrow(0, 0, plan_.numel);
}

at::Tensor Bucket::tail() const { return buffer_.narrow(0, plan_.numel, tail_numel_); }

}  // namespace trireme
