#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace trireme::remote {

// Calls `change` for each tensor in a value, in one order on all ranks: items as they come, of a
// Dict its values. (Keys, and items of a set, are no tensors.)
TRIREME_API void change_tensors(Value& value, const std::function<void(at::Tensor&)>& change);
TRIREME_API std::vector<at::Tensor> tensors_of(const Value& value);

// Returns a gradient in the layout in which it is sent: dense.
TRIREME_API at::Tensor dense(const at::Tensor& gradient);

}  // namespace trireme::remote
