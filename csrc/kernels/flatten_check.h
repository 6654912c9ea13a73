#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string_view>

// The checks of flatten.h's contract, made by every device's kernel, because an operator can be
// reached past the functions of flatten.h. Both work on fake tensors with symbolic shapes.
namespace trireme {

void check_flatten(std::string_view area, at::TensorList tensors, const at::Tensor& flat);

// Returns the number of elements of a flat tensor of `dtype` that holds these tensors.
c10::SymInt flat_numel(at::TensorList tensors, at::ScalarType dtype);

}  // namespace trireme
