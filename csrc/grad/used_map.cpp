#include <trireme/grad/used_map.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace trireme {

UsedMap::UsedMap(int64_t parameters)
    : parameters_(parameters),
      used_here_(static_cast<size_t>(parameters), false),
      counts_(static_cast<size_t>(parameters), 0) {}

// All summands are whole numbers, and so is the sum of their magnitudes below 2^24, which fp32
// holds: |share * number| summed up is below 2 * world * range, and each change adds 4 * world *
// range.
void UsedMap::compare(int64_t number, int64_t share, int64_t world) {
  constexpr int64_t kMostRange = 4096;
  const int64_t range = std::min(kMostRange, (int64_t{1} << 24) / (4 * world * (world + 1)));
  change_ = static_cast<float>(std::max<int64_t>(4 * world * range, 1));
  compared_ = range > 1 ? static_cast<float>(share * (number % range)) : 0.0F;
}

const at::Tensor& UsedMap::own_wire(c10::Device device) {
  if (!own_wire_.defined())
    own_wire_ = at::empty({numel()}, at::TensorOptions().dtype(at::kFloat).device(device));
  return own_wire_;
}

void UsedMap::write_to(const at::Tensor& transport, bool shadow) const {
  const bool goes_to_gpu =
      !transport.is_cpu();  // from pinned memory, so that nobody waits for the copy
  at::Tensor host = at::zeros({numel()}, at::dtype(at::kFloat).pinned_memory(goes_to_gpu));
  auto* values = host.mutable_data_ptr<float>();
  if (!shadow) {
    for (int64_t i = 0; i < parameters_; ++i) values[i] = used_here(i) ? 1.0F : 0.0F;
  }
  values[parameters_] = (changed_here_ ? change_ : 0.0F) + compared_;
  transport.copy_(host, /*non_blocking=*/goes_to_gpu);
}

void UsedMap::start_reading(const at::Tensor& transport) {
  const at::Tensor sums = transport.to(at::kFloat);
  if (transport.is_cpu()) {
    read_ = sums;
    return;
  }
  if (!handoff_) handoff_.emplace(transport.device());
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
  const float changes = std::round(values[parameters_] / change_);
  changed_anywhere_ = changes > 0;
  numbers_differ_ = values[parameters_] != changes * change_;
  read_.reset();
}

bool UsedMap::any_used_here() const {
  return std::find(used_here_.begin(), used_here_.end(), true) != used_here_.end();
}

void UsedMap::begin_anew(const std::function<bool(size_t parameter, bool used)>& still_counts) {
  for (size_t i = 0; i < used_here_.size(); ++i) used_here_[i] = still_counts(i, used_here_[i]);
  changed_here_ = false;
}

}  // namespace trireme
