#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace trireme {

// The owners of tensors; keeps neither owners nor tensors alive. Thread-safe.
template <typename Owner>
class TensorRegistry {
 public:
  // Makes `owner` the owner of these tensors from now on, for as long as it lives.
  void put(const std::vector<at::Tensor>& tensors, const std::shared_ptr<Owner>& owner) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(owned_, [](const auto& item) { return item.second.owner.expired(); });
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined())
        owned_.insert_or_assign(tensor.unsafeGetTensorImpl(), Owned(tensor, owner));
    }
    is_empty_ = owned_.empty();
  }

  std::shared_ptr<Owner> find(const at::Tensor& tensor) const {
    if (is_empty_) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = owned_.find(tensor.unsafeGetTensorImpl());
    return found == owned_.end() ? nullptr : found->second.owner.lock();
  }

 private:
  // Keeps a tensor's address from being used again, but not the tensor alive.
  struct Owned {
    c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> tensor;
    std::weak_ptr<Owner> owner;

    Owned(const at::Tensor& owned, const std::shared_ptr<Owner>& its_owner)
        : tensor(owned.getIntrusivePtr()), owner(its_owner) {}
  };

  mutable std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Owned> owned_;
  std::atomic<bool> is_empty_{true};
};

}  // namespace trireme
