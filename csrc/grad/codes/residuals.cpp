#include <trireme/grad/codes/residuals.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {

Residuals::Entry* Residuals::find(const at::Tensor& parameter) {
  const auto found = entries_.find(parameter.unsafeGetTensorImpl());
  if (found == entries_.end()) return nullptr;
  if (!found->second.parameter.expired()) return &found->second;
  entries_.erase(found);  // of an earlier parameter at that address
  return nullptr;
}

at::Tensor Residuals::of(const at::Tensor& parameter, int64_t numel) {
  if (const Entry* entry = find(parameter); entry != nullptr && entry->values.numel() == numel)
    return entry->values;
  if (entries_.size() >= most_) drop_ended();
  at::Tensor values = at::zeros({numel}, at::kFloat);
  entries_.insert_or_assign(
      parameter.unsafeGetTensorImpl(),
      Entry{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()), values});
  return values;
}

void Residuals::drop_ended() {
  std::erase_if(entries_, [](const auto& entry) { return entry.second.parameter.expired(); });
  most_ = 2 * entries_.size() + 64;
}

void Residuals::keep_copy(const at::Tensor& parameter) {
  if (const Entry* entry = find(parameter))
    copies_.insert_or_assign(parameter.unsafeGetTensorImpl(), entry->values.clone());
}

void Residuals::take_back(const at::Tensor& parameter) {
  const auto copy = copies_.find(parameter.unsafeGetTensorImpl());
  if (copy == copies_.end()) return;
  if (const Entry* entry = find(parameter)) entry->values.copy_(copy->second);
}

}  // namespace trireme
