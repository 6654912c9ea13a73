#pragma once

#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <string>

namespace trireme {

// The version of a tensor when it was saved.
class TRIREME_API SavedVersion {
 public:
  explicit SavedVersion(const at::Tensor& tensor)
      : counter_(tensor.unsafeGetTensorImpl()->version_counter()), saved_(now()) {}

  bool has_changed() const { return now() != saved_; }

  // Throws what autograd throws for a tensor that was changed in place.
  [[noreturn]] void refuse(const std::string& tensor) const;

 private:
  uint32_t now() const { return counter_.enabled() ? counter_.current_version() : 0; }

  c10::VariableVersion counter_;
  uint32_t saved_;
};

// A saved tensor kept as autograd keeps it; unpack() throws if it was changed in place since.
class TRIREME_API KeptTensor : public PackedSavedTensor {
 public:
  // A leaf is kept itself, as in autograd, and so follows assignments to its `.data`. Other tensors
  // are detached: one might be the output of the node that keeps it.
  explicit KeptTensor(const at::Tensor& tensor)
      : tensor_(tensor.is_leaf() ? tensor : tensor.detach()), version_(tensor) {}

  at::Tensor unpack() override {
    if (version_.has_changed()) version_.refuse(tensor_.toString());
    return tensor_.requires_grad() ? tensor_.detach() : tensor_;
  }

 private:
  at::Tensor tensor_;
  SavedVersion version_;
};

}  // namespace trireme
