#include <trireme/grad/bucket.h>

#include <trireme/common/error.h>
#include <trireme/common/resolved.h>
#include <trireme/kernels/span.h>
#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <utility>

namespace trireme {
namespace {

// Returns the planned strides; a contiguous parameter may have any strides where it has one row.
std::vector<int64_t> slot_strides(const at::Tensor& parameter, const ParameterInfo& info) {
  if (!info.strides.empty()) return info.strides;
  const bool is_as_planned =
      parameter.is_contiguous() && parameter.sizes() == at::IntArrayRef(info.sizes);
  return is_as_planned ? parameter.strides().vec() : at::detail::defaultStrides(info.sizes);
}

[[noreturn]] void lacks(const char* what) {
  TORCH_INTERNAL_ASSERT(false, "this kind of bucket lacks ", what);
}

// Return memory as a kernel sees it: complex numbers are pairs of reals.
at::ScalarType real_dtype(at::ScalarType dtype) { return c10::toRealValueType(dtype); }
int64_t real_numel(at::ScalarType dtype, int64_t numel) {
  return c10::isComplexType(dtype) ? 2 * numel : numel;
}

}  // namespace

Bucket::Bucket(PlannedBucket plan, const std::vector<at::Tensor>& parameters,
               const std::vector<ParameterInfo>& infos, int64_t tail_numel, OwnShards own)
    : plan_(std::move(plan)),
      parameters_(parameters),
      tail_numel_(tail_numel),
      own_(std::move(own)) {
  grads_may_alias_ = !plan_.sparse;
  for (const BucketSlot& planned : plan_.slots) {
    const auto index = static_cast<size_t>(planned.parameter);
    const ParameterInfo& info = infos[index];
    grads_may_alias_ = grads_may_alias_ && info.gradient_dtype() == plan_.dtype;
    Slot slot;
    slot.name = info.name;
    slot.sizes = info.sizes;
    slot.strides = slot_strides(parameters_[index], info);
    slot.dtype = info.gradient_dtype();
    slots_.push_back(std::move(slot));
  }
}

bool Bucket::delivers_as(const std::vector<ParameterInfo>& infos) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto index = static_cast<size_t>(plan_.slots[i].parameter);
    if (slots_[i].dtype != infos[index].gradient_dtype()) return false;
  }
  return true;
}

const at::Tensor& Bucket::parameter(size_t slot) const {
  return parameters_[static_cast<size_t>(plan_.slots[slot].parameter)];
}

at::Tensor Bucket::contribution(size_t slot) const {
  return shadow_ || slots_[slot].empty ? at::Tensor() : parameter(slot).grad();
}

bool Bucket::holds_gradient_of(const at::Tensor& parameter) const {
  const at::Tensor& grad = parameter.grad();
  return grad.defined() && home().defined() && grad.layout() == at::kStrided &&
         grad.has_storage() &&
         grad.storage().unsafeGetStorageImpl() == home().storage().unsafeGetStorageImpl();
}

at::Tensor Bucket::range(size_t slot) const {
  return range_of(home(), slots_[slot].sizes, slots_[slot].strides, plan_.slots[slot].offset);
}

void Bucket::begin_step(bool shadow) {
  shadow_ = shadow;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.packed = slot.arrived = slot.empty = false;
    slot.saved.reset();
    const at::Tensor& grad = parameter(i).grad();
    slot.origin = !grad.defined()     ? GradOrigin::kFresh
                  : is_range(grad, i) ? GradOrigin::kInPlace
                                      : GradOrigin::kForeign;
  }
}

void Bucket::leave_empty(size_t index) {
  Slot& slot = slots_[index];
  slot.empty = true;
  if (slot.origin != GradOrigin::kInPlace) return;
  const at::Tensor& grad = parameter(index).grad();
  grad.set_data(grad.clone());
  slot.origin = GradOrigin::kForeign;
}

void Bucket::check_dtype(const at::Tensor& grad, const Slot& slot) const {
  const at::ScalarType given = grad.scalar_type();
  TORCH_CHECK(given == slot.dtype || given == plan_.dtype,
              error_text("grad_reducer",
                         "got a gradient of '" + slot.name + "' in " + c10::toString(given) +
                             ", expected it in " + c10::toString(slot.dtype) +
                             ", the dtype that all ranks have planned",
                         {}, "Set the parameter's grad_dtype to that of its gradients."));
}

at::Tensor Bucket::arranged(const at::Tensor& grad, const Slot& slot) const {
  check_dtype(grad, slot);
  TORCH_CHECK(grad.sizes() == at::IntArrayRef(slot.sizes),
              error_text("grad_reducer",
                         "got a gradient of " + c10::str(grad.sizes()) + ", expected one of " +
                             c10::str(at::IntArrayRef(slot.sizes)) +
                             " as its parameter was when the forward began",
                         {}, "Give parameters other data before the forward."));
  const bool is_arranged = grad.layout() == at::kStrided &&
                           grad.strides() == at::IntArrayRef(slot.strides) && is_resolved(grad);
  if (is_arranged) return grad;
  const at::Tensor dense = grad.layout() == at::kStrided ? grad : grad.to_dense();
  return at::empty_strided(slot.sizes, slot.strides, dense.options()).copy_(dense);
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
  if (!plan_.device.is_cpu() || slot.origin != GradOrigin::kFresh || shadow_) return;
  at::Tensor& grad = parameter(index).mutable_grad();
  if (!grad.defined()) return;  // a node returned no gradient
  write(index, grad, {scale, /*add=*/slot.packed});
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

void Bucket::drop_taken() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const bool is_taken = slots_[i].origin == GradOrigin::kFresh && !slots_[i].empty;
    if (is_taken && !shadow_) parameter(i).mutable_grad().reset();
  }
}

void Bucket::take_result(const at::Tensor& result) {
  at::Tensor own = payload();
  if (!result.is_alias_of(own)) own.copy_(result.view_as(own));
}

void Bucket::deliver(size_t /*slot*/, bool /*as_bucket_view*/) { lacks("whole sums"); }

at::Tensor Bucket::spread_sum(size_t /*slot*/) { lacks("shards"); }

at::Tensor Bucket::own_sum(size_t /*slot*/, at::IntArrayRef /*sizes*/,
                           at::IntArrayRef /*strides*/) const {
  lacks("shards");
}

at::Tensor Bucket::own_sums() { lacks("sums of their own"); }

std::vector<at::Tensor> Bucket::sums_of(const std::vector<bool>& /*chosen*/) {
  lacks("sums of their own");
}

at::Tensor Bucket::own_part(const at::Tensor& grad, size_t slot) const {
  const ShardRange own = this->own(slot);
  return grad.view({-1}).narrow(0, own.begin, own.numel);
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

void Bucket::adopt_range(size_t slot, const Bucket& earlier) {
  if (!grads_may_alias_ || !earlier.grads_may_alias_) return;
  have_home();
  at::Tensor& grad = parameter(slot).mutable_grad();
  const at::Tensor place = range(slot);
  const at::NoGradGuard no_grad;
  place.copy_(grad);
  grad.set_data(place);
}

}  // namespace trireme
