#include <trireme/kernels/flatten_check.h>

#include <trireme/common/error.h>
#include <trireme/common/resolved.h>
#include <trireme/kernels/checks.h>

#include <string>

namespace trireme {
namespace {

constexpr char kDtypes[] = "real or complex float32, float64, float16 or bfloat16";

c10::SymInt sym_reals(at::TensorList tensors) {
  c10::SymInt sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += tensor.is_complex() ? tensor.sym_numel() * 2 : tensor.sym_numel();
  }
  return sum;
}

void check_tensor(std::string_view area, const at::Tensor& tensor, size_t index,
                  const at::Tensor& flat) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided,
                   error_text(area,
                              text_of("got tensor ", index, " of layout ", tensor.layout(),
                                      ", expected a strided one"),
                              {}, "Keep sparse tensors out of the list."));
  TORCH_CHECK_TYPE(is_supported(tensor.scalar_type()),
                   error_text(area,
                              text_of("got dtype ", tensor.scalar_type(), " for tensor ", index,
                                      ", expected ", kDtypes),
                              {}, "Keep other dtypes out of the list."));
  TORCH_CHECK_VALUE(tensor.device() == flat.device(),
                    error_text(area,
                               text_of("got tensor ", index, " on ", tensor.device(), ", expected ",
                                       flat.device(), " where the flat tensor is"),
                               {}, "Move one of them."));
  TORCH_CHECK_VALUE(
      tensor.is_non_overlapping_and_dense(),
      error_text(area,
                 text_of("got tensor ", index, " of shape ", tensor.sym_sizes(), " with strides ",
                         tensor.sym_strides(), ", expected non-overlapping and dense memory"),
                 {}, "Call contiguous() on it first."));
  TORCH_CHECK_VALUE(is_resolved(tensor),
                    error_text(area,
                               text_of("got tensor ", index,
                                       " with a minus or conj() that torch has put off, "
                                       "expected its values in memory"),
                               {}, "Call resolve_conj().resolve_neg() on it first."));
}

void check_flat(std::string_view area, const at::Tensor& flat) {
  TORCH_CHECK_TYPE(is_supported(flat.scalar_type()),
                   error_text(area,
                              text_of("got dtype ", flat.scalar_type(),
                                      " for the flat tensor, expected ", kDtypes),
                              {}, "Choose one of these."));
  TORCH_CHECK_VALUE(
      flat.dim() == 1 && flat.is_contiguous(),
      error_text(area,
                 text_of("got a flat tensor of shape ", flat.sym_sizes(), " with strides ",
                         flat.sym_strides(), ", expected one contiguous dimension"),
                 {}, "Allocate it with torch.empty(numel)."));
}

}  // namespace

void check_flatten(std::string_view area, at::TensorList tensors, const at::Tensor& flat) {
  check_flat(area, flat);
  for (size_t i = 0; i < tensors.size(); ++i) check_tensor(area, tensors[i], i, flat);
  const c10::SymInt got = sym_reals(flat);
  const c10::SymInt expected = sym_reals(tensors);
  TORCH_CHECK_VALUE(got == expected,
                    error_text(area,
                               text_of("got a flat tensor of ", got, " real elements, expected ",
                                       expected, " as in the ", tensors.size(), " tensors"),
                               {}, "Allocate the flat tensor for this list."));
}

c10::SymInt flat_numel(at::TensorList tensors, at::ScalarType dtype) {
  const c10::SymInt reals = sym_reals(tensors);
  if (!c10::isComplexType(dtype)) return reals;
  TORCH_CHECK_VALUE(reals % 2 == 0, error_text("flatten",
                                               text_of("got ", reals, " real elements for dtype ",
                                                       dtype, ", expected an even number"),
                                               {}, "Flatten to the real dtype."));
  return reals / 2;
}

}  // namespace trireme
