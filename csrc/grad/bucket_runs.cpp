#include <trireme/grad/bucket.h>
#include <trireme/kernels/flatten.h>
#include <trireme/memory/buffer_pool.h>

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
  buffer_ = own_.pool->empty({own_.plan->world * run_numel_}, plan_.dtype, "gradients");
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

std::vector<at::Tensor> Bucket::sums_of(const std::vector<bool>& chosen) {
  std::vector<at::Tensor> found;
  int64_t begin = 0;
  int64_t end = 0;  // end of neighbours
  const auto add = [&] {
    if (end > begin) found.push_back(sums().narrow(0, begin, end - begin));
  };
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!chosen[i]) continue;
    if (slots_[i].offset != end) {
      add();
      begin = slots_[i].offset;
    }
    end = slots_[i].offset + slots_[i].run_numel;
  }
  add();
  return found;
}

void Bucket::write_runs(size_t index, const at::Tensor& grad, double scale, bool add) {
  const Slot& slot = slots_[index];
  if (!buffer_.defined()) allocate();
  const at::Tensor dense = arranged(grad, slot);
  for (int64_t rank = 0; rank < own_.plan->world; ++rank) {
    const ShardRange part = part_of(index, rank);
    if (part.numel > 0) write_range(rank * run_numel_ + slot.offset, dense, part, {scale, add});
  }
}

void Bucket::complete_runs(double scale) {
  if (!buffer_.defined()) allocate();
  if (!plan_.device.is_cpu()) {
    flatten(runs_on_device(), buffer_, scale);
  } else {
    for (size_t i = 0; i < slots_.size(); ++i) {
      const at::Tensor grad = contribution(i);
      if (!slots_[i].packed && grad.defined()) {
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
    const bool is_taken = slots_[i].origin == GradOrigin::kFresh && !slots_[i].empty;
    if (is_taken && !shadow_) parameter(i).mutable_grad().reset();
  }
}

// One launch for the whole bucket.
std::vector<at::Tensor> Bucket::runs_on_device() {
  std::vector<at::Tensor> flat;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor grad = contribution(i);
    if (!grad.defined()) {
      flat.push_back(at::zeros({slots_[i].numel}, buffer_.options()));
      continue;
    }
    flat.push_back(arranged(grad, slots_[i]).as_strided({slots_[i].numel}, {1}));
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
