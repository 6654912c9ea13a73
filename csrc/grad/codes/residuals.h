#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <unordered_map>

namespace trireme {

// What this sender's codes have left out so far, by parameter; see [Note: gradient compression].
// A residual belongs to a parameter, whatever bucket it is in, and ends with it. Memory: 4 bytes
// per real number of each parameter that was coded.
class TRIREME_API Residuals {
 public:
  // Returns the residual of a parameter, flat, fp32, on the CPU: of `numel` zeros the first time,
  // and when the parameter has got another size.
  at::Tensor of(const at::Tensor& parameter, int64_t numel);

  // Remembers what the residual of a parameter is, for take_back(), until forget_copies().
  void keep_copy(const at::Tensor& parameter);
  // Brings back what keep_copy() remembered: the code that was sent since is lost.
  void take_back(const at::Tensor& parameter);
  void forget_copies() { copies_.clear(); }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
    at::Tensor values;
  };
  Entry* find(const at::Tensor& parameter);
  void drop_ended();

  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> copies_;
  size_t most_ = 64;  // entries before those of parameters that have ended are looked for
};

}  // namespace trireme
