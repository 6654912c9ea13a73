#include <trireme/kernels/optimizer_rows.h>

#include <trireme/common/error.h>
#include <trireme/common/resolved.h>
#include <trireme/kernels/checks.h>
#include <trireme/kernels/span.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <string>

namespace trireme {
namespace {

// Returns fp32, complex if the parameter is.
at::ScalarType single_of(at::ScalarType param) {
  return c10::isComplexType(param) ? at::kComplexFloat : at::kFloat;
}

struct Checked {
  std::string_view area;
  size_t index;  // index of the parameter
  const at::Tensor& param;
};

void check_dtype(const Checked& row, const char* name, const at::Tensor& tensor,
                 std::array<at::ScalarType, 2> allowed) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == allowed[0] || dtype == allowed[1],
      error_text(
          row.area,
          text_of("got ", name, " of dtype ", dtype, " for parameter ", row.index, " of dtype ",
                  row.param.scalar_type(), ", expected ", allowed[0],
                  allowed[0] == allowed[1] ? std::string()
                                           : std::string(" or ") + c10::toString(allowed[1])),
          {}, "Convert it first."));
}

void check_place(const Checked& row, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.sizes() == row.param.sizes(),
      error_text(row.area,
                 text_of("got ", name, " of shape ", tensor.sizes(), " for parameter ", row.index,
                         ", expected ", row.param.sizes()),
                 {}, "Load a state of the same model."));
  TORCH_CHECK_VALUE(tensor.device() == row.param.device(),
                    error_text(row.area,
                               text_of("got ", name, " on ", tensor.device(), " for parameter ",
                                       row.index, ", expected ", row.param.device()),
                               {}, "Move it to where the parameter is."));
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && is_resolved(tensor);
}

// Returns whether memory orders match; strides of dimensions of one element may differ.
bool is_in_order_of(const at::Tensor& pattern, const at::Tensor& tensor) {
  if (pattern.is_contiguous()) return tensor.is_contiguous();
  return tensor.strides() == pattern.strides();
}

}  // namespace

void check_row(std::string_view area, size_t index, const OptimizerRow& row) {
  const Checked checked = {area, index, row.param};
  TORCH_CHECK(row.grad.layout() == at::kStrided,  // a RuntimeError, as torch's Adam raises
              error_text(area,
                         text_of("got a gradient of layout ", row.grad.layout(), " for parameter ",
                                 index, ", expected a strided one"),
                         {}, "Use torch.optim.SparseAdam or torch.optim.SGD for it."));
  TORCH_CHECK_TYPE(row.param.layout() == at::kStrided && is_supported(row.param.scalar_type()),
                   error_text(area,
                              text_of("got dtype ", row.param.scalar_type(), " and layout ",
                                      row.param.layout(), " for parameter ", index,
                                      ", expected a strided float32, float64, float16 or bfloat16"),
                              {}, "Leave it to another optimizer."));
  const at::ScalarType dtype = row.param.scalar_type();
  check_dtype(checked, "a gradient", row.grad, {dtype, single_of(dtype)});
  check_place(checked, "a gradient", row.grad);
  for (const at::Tensor* state : row.states) {
    if (state == nullptr) continue;
    const at::ScalarType expected = optimizer_state_dtype(dtype);
    check_dtype(checked, "a state", *state, {expected, expected});
    check_place(checked, "a state", *state);
  }
}

OptimizerSegment DenseRows::segment_of(const OptimizerRow& row, bool write_grad) {
  at::Tensor pattern = row.param;
  void* param = nullptr;
  if (is_dense(pattern)) {
    param = span_of(pattern).data;
  } else {
    pattern = at::empty(row.param.sizes(), row.param.options());
    param = memory_of(row.param, pattern, Access::kWrite);
  }
  const auto state = [&](size_t i) {
    return row.states[i] == nullptr ? nullptr : memory_of(*row.states[i], pattern, Access::kWrite);
  };
  void* grad = memory_of(row.grad, pattern, write_grad ? Access::kWrite : Access::kRead);
  return {param, grad, state(0), state(1), state(2), span_of(pattern).numel};
}

void* DenseRows::memory_of(const at::Tensor& tensor, const at::Tensor& pattern, Access access) {
  if (is_dense(tensor) && is_in_order_of(pattern, tensor)) return span_of(tensor).data;
  const at::Tensor copy =
      at::empty_strided(pattern.sizes(), pattern.strides(), tensor.options()).copy_(tensor);
  copies_.push_back({tensor, copy, access});
  return span_of(copy).data;
}

void DenseRows::finish() {
  for (const Copy& copy : copies_) {
    if (copy.access == Access::kWrite) copy.original.copy_(copy.copy);
  }
  copies_.clear();
}

}  // namespace trireme
