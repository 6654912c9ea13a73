#include <trireme/grad/bucket.h>
#include <trireme/kernels/flatten.h>
#include <trireme/kernels/span.h>

#include <ATen/ATen.h>

#include <algorithm>

// A bucket that is reduce_scattered: one run per rank. See [Note: who owns a gradient's memory] in
// bucket.h.

namespace trireme {

void Bucket::plan_runs() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.offset = run_numel_;
    for (int64_t rank = 0; rank < own_.plan->world; ++rank)
      slot.run_numel = std::max(slot.run_numel, part_of(i, rank).numel);
    run_numel_ += slot.run_numel;
  }
}

void Bucket::allocate_runs() {
  buffer_ = at::empty({own_.plan->world * run_numel_},
                      at::TensorOptions().dtype(plan_.dtype).device(plan_.device));
  for (size_t i = 0; i < slots_.size(); ++i) {  // it is summed up, too
    for (int64_t rank = 0; rank < own_.plan->world; ++rank) {
      const int64_t numel = part_of(i, rank).numel;
      const int64_t padding = slots_[i].run_numel - numel;
      if (padding > 0)
        buffer_.narrow(0, rank * run_numel_ + slots_[i].offset + numel, padding).zero_();
    }
  }
}

ShardRange Bucket::part_of(size_t slot, int64_t rank) const {
  return own_.plan->of(plan_.slots[slot].parameter, rank);
}

const at::Tensor& Bucket::sums() {
  if (!sums_.defined()) sums_ = at::empty({run_numel_}, buffer_.options());
  return sums_;
}

void Bucket::write_runs(size_t index, const at::Tensor& grad, double scale, bool add) {
  const Slot& slot = slots_[index];
  if (!buffer_.defined()) allocate();
  const at::Tensor dense = is_arranged(grad, slot) ? grad : arrange(grad, slot);
  const at::ScalarType to = c10::toRealValueType(plan_.dtype);
  const at::ScalarType from = c10::toRealValueType(dense.scalar_type());
  const int64_t reals = c10::isComplexType(plan_.dtype) ? 2 : 1;
  const auto item = static_cast<int64_t>(buffer_.element_size());
  const auto source_item = static_cast<int64_t>(dense.element_size());
  auto* buffer = static_cast<char*>(buffer_.mutable_data_ptr());
  const auto* data = static_cast<const char*>(dense.const_data_ptr());
  for (int64_t rank = 0; rank < own_.plan->world; ++rank) {
    const ShardRange part = part_of(index, rank);
    if (part.numel == 0) continue;
    char* target = buffer + (rank * run_numel_ + slot.offset) * item;
    const Span into{target, to, part.numel * reals};
    const ConstSpan source{data + part.begin * source_item, from, part.numel * reals};
    add ? scaled_add(into, source, scale) : scaled_copy(into, source, scale);
  }
}

void Bucket::complete_runs(double scale) {
  if (!buffer_.defined()) allocate();
  if (!plan_.device.is_cpu()) {
    flatten(runs_on_device(), buffer_, scale);
  } else {
    for (size_t i = 0; i < slots_.size(); ++i) {
      const at::Tensor& grad = parameter(i).grad();
      if (!slots_[i].packed && grad.defined() && !shadow_) {
        write_runs(i, grad, scale, /*add=*/false);
      } else if (!slots_[i].packed) {
        buffer_.view({own_.plan->world, run_numel_})
            .narrow(1, slots_[i].offset, slots_[i].run_numel)
            .zero_();
      }
    }
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].packed = true;
    if (slots_[i].origin == GradOrigin::kFresh && !shadow_) parameter(i).mutable_grad().reset();
  }
}

// One launch for the whole bucket.
std::vector<at::Tensor> Bucket::runs_on_device() {
  std::vector<at::Tensor> flat;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& grad = parameter(i).grad();
    if (!grad.defined() || shadow_) {
      flat.push_back(at::zeros({slots_[i].numel}, buffer_.options()));
      continue;
    }
    const at::Tensor dense = is_arranged(grad, slots_[i]) ? grad : arrange(grad, slots_[i]);
    flat.push_back(dense.as_strided({slots_[i].numel}, {1}));
  }
  std::vector<at::Tensor> sources;
  for (int64_t rank = 0; rank < own_.plan->world; ++rank) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      const ShardRange part = part_of(i, rank);
      sources.push_back(flat[i].narrow(0, part.begin, part.numel));
      const int64_t padding = slots_[i].run_numel - part.numel;
      if (padding > 0) sources.push_back(at::zeros({padding}, buffer_.options()));
    }
  }
  return sources;
}

}  // namespace trireme
