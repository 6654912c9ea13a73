#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <unordered_map>

namespace trireme {

// What a sender keeps of one parameter from step to step.
struct KeptOfCode {
  // What codes have left out so far, flat, fp32, on the CPU; see [Note: gradient compression].
  // Undefined without error feedback.
  at::Tensor residual = {};
  at::Tensor basis = {};  // Q of PowerSGD
  float threshold = 0;    // of TopK
};

// What this sender keeps, by parameter, whatever bucket that is in. It ends with the parameter.
// Memory: 4 bytes per real number of each parameter that was coded, if there is error feedback.
class TRIREME_API Residuals {
 public:
  // Returns what is kept of a parameter, anew the first time and when it has got another size: of
  // `numel` zeros, if `has_feedback`. The reference is good until forget_copies().
  KeptOfCode& of(const at::Tensor& parameter, int64_t numel, bool has_feedback);

  // Returns what is kept of a parameter, null if nothing is.
  KeptOfCode* find(const at::Tensor& parameter) {
    Entry* entry = entry_of(parameter);
    return entry != nullptr ? &entry->kept : nullptr;
  }

  // Remembers what is kept of a parameter, for take_back(), until forget_copies().
  void keep_copy(const at::Tensor& parameter);
  // Brings back what keep_copy() remembered: the code that was sent since is lost.
  void take_back(const at::Tensor& parameter);
  void take_back_all();
  // Begins a step.
  void forget_copies();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
    int64_t numel;
    KeptOfCode kept;
  };
  Entry* entry_of(const at::Tensor& parameter);

  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::unordered_map<const c10::TensorImpl*, KeptOfCode> copies_;
  size_t most_ = 64;  // entries before those of parameters that have ended are looked for
};

}  // namespace trireme
