#include <trireme/grad/used_map.h>

#include <ATen/ATen.h>

#include <algorithm>

namespace trireme {

UsedMap::UsedMap(int64_t parameters)
    : parameters_(parameters),
      used_here_(static_cast<size_t>(parameters), false),
      counts_(static_cast<size_t>(parameters), 0) {}

const at::Tensor& UsedMap::own_wire(c10::Device device) {
  if (!own_wire_.defined())
    own_wire_ = at::empty({numel()}, at::TensorOptions().dtype(at::kFloat).device(device));
  return own_wire_;
}

void UsedMap::write_to(const at::Tensor& wire, bool shadow) const {
  const bool goes_to_gpu = !wire.is_cpu();  // from pinned memory, so that nobody waits for the copy
  at::Tensor host = at::zeros({numel()}, at::dtype(at::kFloat).pinned_memory(goes_to_gpu));
  auto* values = host.mutable_data_ptr<float>();
  if (!shadow) {
    for (int64_t i = 0; i < parameters_; ++i) values[i] = used_here(i) ? 1.0F : 0.0F;
  }
  values[parameters_] = changed_here_ ? 1.0F : 0.0F;
  wire.copy_(host, /*non_blocking=*/goes_to_gpu);
}

void UsedMap::start_reading(const at::Tensor& wire) {
  const at::Tensor sums = wire.to(at::kFloat);
  if (wire.is_cpu()) {
    read_ = sums;
    return;
  }
  if (!handoff_) handoff_.emplace(wire.device());
  read_ = at::empty({numel()}, at::dtype(at::kFloat).pinned_memory(true));
  read_.copy_(sums, /*non_blocking=*/true);
  handoff_->note();
}

void UsedMap::finish_reading() {
  if (handoff_) handoff_->wait();
  const auto* values = read_.const_data_ptr<float>();
  for (int64_t i = 0; i < parameters_; ++i) {
    counts_[static_cast<size_t>(i)] = static_cast<int64_t>(values[i]);
  }
  changed_anywhere_ = values[parameters_] > 0;
  read_.reset();
}

void UsedMap::clear() {
  std::fill(used_here_.begin(), used_here_.end(), false);
  changed_here_ = false;
}

}  // namespace trireme
