#include <trireme/kernels/flatten.h>

#include <trireme/common/error.h>
#include <trireme/kernels/flatten_check.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <vector>

namespace trireme {
namespace {

using IntoFlat = void(at::TensorList, const at::Tensor&, double);
using OutOfFlat = void(const at::Tensor&, at::TensorList, double);
using NewFlat = at::Tensor(at::TensorList, at::ScalarType, double);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

const c10::TypedOperatorHandle<IntoFlat>& flatten_op() {
  static const auto op = find<IntoFlat>("trireme::flatten", "into");
  return op;
}

const c10::TypedOperatorHandle<IntoFlat>& flatten_accumulate_op() {
  static const auto op = find<IntoFlat>("trireme::flatten_accumulate");
  return op;
}

const c10::TypedOperatorHandle<OutOfFlat>& unflatten_op() {
  static const auto op = find<OutOfFlat>("trireme::unflatten");
  return op;
}

// One kernel for all devices: allocates, and leaves the rest to the device's flatten.into. An empty
// list has no device of its own; the dispatcher then calls this kernel, too.
at::Tensor flatten_new(at::TensorList inputs, at::ScalarType dtype, double scale) {
  const at::TensorOptions options =
      inputs.empty() ? at::TensorOptions() : at::TensorOptions().device(inputs[0].device());
  const at::Tensor flat = at::empty_symint({flat_numel(inputs, dtype)}, options.dtype(dtype));
  flatten_op().call(inputs, flat, scale);
  return flat;
}

// The fake kernels write nothing, but refuse what the real ones refuse.
void fake_flatten(at::TensorList inputs, const at::Tensor& flat, double /*scale*/) {
  check_flatten("flatten", inputs, flat);
}

void fake_flatten_accumulate(at::TensorList inputs, const at::Tensor& flat, double /*scale*/) {
  check_flatten("flatten_accumulate", inputs, flat);
}

void fake_unflatten(const at::Tensor& flat, at::TensorList outputs, double /*scale*/) {
  check_flatten("unflatten", outputs, flat);
}

// Moves the version counter, as torch's in-place operators do, so that a graph which saved the old
// values notices.
void bump_version(const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

template <const c10::TypedOperatorHandle<IntoFlat>& (*op)()>
void bump_flat(c10::DispatchKeySet keys, at::TensorList inputs, const at::Tensor& flat,
               double scale) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op().redispatch(keys & c10::after_ADInplaceOrView_keyset, inputs, flat, scale);
  }
  bump_version(flat);
}

void bump_outputs(c10::DispatchKeySet keys, const at::Tensor& flat, at::TensorList outputs,
                  double scale) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    unflatten_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, flat, outputs, scale);
  }
  for (const at::Tensor& output : outputs) bump_version(output);
}

}  // namespace

void flatten(at::TensorList inputs, const at::Tensor& flat, double scale) {
  flatten_op().call(inputs, flat, scale);
}

at::Tensor flatten(at::TensorList inputs, at::ScalarType dtype, double scale) {
  static const auto op = find<NewFlat>("trireme::flatten");
  return op.call(inputs, dtype, scale);
}

void flatten_accumulate(at::TensorList inputs, const at::Tensor& flat, double scale) {
  flatten_accumulate_op().call(inputs, flat, scale);
}

void unflatten(const at::Tensor& flat, at::TensorList outputs, double scale) {
  unflatten_op().call(flat, outputs, scale);
}

TORCH_LIBRARY_FRAGMENT(trireme, m) {
  // The result depends on the memory order of the tensors, so a compiler may not change their
  // strides.
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  m.def("flatten(Tensor[] inputs, ScalarType dtype, float scale=1.0) -> Tensor", tags);
  m.def("flatten.into(Tensor[] inputs, Tensor(a!) flat, float scale=1.0) -> ()", tags);
  m.def("flatten_accumulate(Tensor[] inputs, Tensor(a!) flat, float scale=1.0) -> ()", tags);
  m.def("unflatten(Tensor flat, Tensor(a!)[] outputs, float scale=1.0) -> ()", tags);
}

TORCH_LIBRARY_IMPL(trireme, CompositeExplicitAutograd, m) { m.impl("flatten", &flatten_new); }

TORCH_LIBRARY_IMPL(trireme, Meta, m) {
  m.impl("flatten", &flatten_new);
  m.impl("flatten.into", &fake_flatten);
  m.impl("flatten_accumulate", &fake_flatten_accumulate);
  m.impl("unflatten", &fake_unflatten);
}

TORCH_LIBRARY_IMPL(trireme, ADInplaceOrView, m) {
  m.impl("flatten.into", &bump_flat<flatten_op>);
  m.impl("flatten_accumulate", &bump_flat<flatten_accumulate_op>);
  m.impl("unflatten", &bump_outputs);
}

// Asking for a derivative raises: gradients and parameters pass through here, never tensors of
// which a graph is built.
TORCH_LIBRARY_IMPL(trireme, Autograd, m) {
  m.impl("flatten", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace trireme
