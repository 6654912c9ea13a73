#include <trireme/grad/codes/residuals.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {

Residuals::Entry* Residuals::entry_of(const at::Tensor& parameter) {
  const auto found = entries_.find(parameter.unsafeGetTensorImpl());
  if (found == entries_.end() || found->second.parameter.expired()) return nullptr;
  return &found->second;
}

KeptOfCode& Residuals::of(const at::Tensor& parameter, int64_t numel, bool has_feedback) {
  if (Entry* entry = entry_of(parameter); entry != nullptr && entry->numel == numel)
    return entry->kept;
  Entry entry{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()), numel, {}};
  if (has_feedback) entry.kept.residual = at::zeros({numel}, at::kFloat);
  return entries_.insert_or_assign(parameter.unsafeGetTensorImpl(), std::move(entry))
      .first->second.kept;
}

void Residuals::keep_copy(const at::Tensor& parameter) {
  const Entry* entry = entry_of(parameter);
  if (entry == nullptr) return;
  KeptOfCode copy = entry->kept;
  if (copy.residual.defined()) copy.residual = copy.residual.clone();
  copies_.insert_or_assign(parameter.unsafeGetTensorImpl(), std::move(copy));
}

void Residuals::take_back(const at::Tensor& parameter) {
  const auto copy = copies_.find(parameter.unsafeGetTensorImpl());
  Entry* entry = entry_of(parameter);
  if (copy != copies_.end() && entry != nullptr) entry->kept = copy->second;
}

void Residuals::take_back_all() {
  for (auto& [parameter, copy] : copies_) {
    const auto found = entries_.find(parameter);
    if (found != entries_.end() && !found->second.parameter.expired()) found->second.kept = copy;
  }
}

void Residuals::forget_copies() {
  copies_.clear();
  if (entries_.size() < most_) return;
  std::erase_if(entries_, [](const auto& entry) { return entry.second.parameter.expired(); });
  most_ = 2 * entries_.size() + 64;
}

}  // namespace trireme
