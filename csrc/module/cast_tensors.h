#pragma once

#include <trireme/module/for_each_tensor.h>

#include <ATen/core/Tensor.h>

#include <optional>

namespace trireme {

// Casts the floating-point tensors in a value (see for_each_tensor.h) to `dtype`, if one is given;
// autograd sees it.
template <typename T>
void cast_tensors(T& value, std::optional<at::ScalarType> dtype) {
  if (!dtype) return;
  for_each_tensor(value, [&](at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(*dtype);
  });
}

}  // namespace trireme
