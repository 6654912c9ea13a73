#include <trireme/kernels/flatten_by_copies.h>

#include <trireme/kernels/flatten_check.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>

namespace trireme::by_copies {
namespace {

// Returns all elements as reals, in memory order; shares memory.
at::Tensor run_of(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  return real.as_strided({real.numel()}, {1});
}

template <typename Move>
void for_parts(at::TensorList tensors, const at::Tensor& flat, const Move& move) {
  const at::Tensor whole = run_of(flat);
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor run = run_of(tensor);
    move(whole.narrow(0, begin, run.numel()), run);
    begin += run.numel();
  }
}

at::Tensor scaled(const at::Tensor& src, at::ScalarType dtype, double scale) {
  if (scale == 1.0 && src.scalar_type() == dtype) return src;
  const bool is_double = src.scalar_type() == at::kDouble || dtype == at::kDouble;
  return src.to(is_double ? at::kDouble : at::kFloat).mul(scale).to(dtype);
}

}  // namespace

void flatten(at::TensorList inputs, const at::Tensor& flat, double scale) {
  check_flatten("flatten", inputs, flat);
  for_parts(inputs, flat, [scale](const at::Tensor& part, const at::Tensor& input) {
    part.copy_(scaled(input, part.scalar_type(), scale));
  });
}

void flatten_accumulate(at::TensorList inputs, const at::Tensor& flat, double scale) {
  check_flatten("flatten_accumulate", inputs, flat);
  for_parts(inputs, flat, [scale](const at::Tensor& part, const at::Tensor& input) {
    part.add_(scaled(input, part.scalar_type(), scale));
  });
}

void unflatten(const at::Tensor& flat, at::TensorList outputs, double scale) {
  check_flatten("unflatten", outputs, flat);
  for_parts(outputs, flat, [scale](const at::Tensor& part, const at::Tensor& output) {
    output.copy_(scaled(part, output.scalar_type(), scale));
  });
}

TORCH_LIBRARY_IMPL(trireme, CompositeExplicitAutograd, m) {
  m.impl("flatten.into", &flatten);
  m.impl("flatten_accumulate", &flatten_accumulate);
  m.impl("unflatten", &unflatten);
}

}  // namespace trireme::by_copies
