#pragma once

#include <ATen/core/Tensor.h>

// The operators of flatten.h in terms of ATen, one or a few ATen calls per tensor: for devices
// without a kernel of their own, and for CUDA if nvcc was missing at build time. Same arguments,
// checks and results.
namespace trireme::by_copies {

void flatten(at::TensorList inputs, const at::Tensor& flat, double scale);
void flatten_accumulate(at::TensorList inputs, const at::Tensor& flat, double scale);
void unflatten(const at::Tensor& flat, at::TensorList outputs, double scale);

}  // namespace trireme::by_copies
