#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace trireme {

// Returns whether the memory of a tensor holds its values. It does not if torch has put off a
// conj() or a minus (z.conj().imag), of which the tensor only has a bit, or has zeros without
// memory. contiguous(), detach() and to() leave such a tensor as it is.
inline bool is_resolved(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

// Returns whether memory holds the values in the order of the elements and without gaps.
inline bool lies_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && is_resolved(tensor);
}

// Returns a tensor whose memory holds the values: the same one if it does. Called before the memory
// of a user's tensor is read.
inline at::Tensor resolved(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options());
  return tensor.resolve_conj().resolve_neg();
}

}  // namespace trireme
