#include <trireme/common/error.h>
#include <trireme/common/stream.h>
#include <trireme/kernels/cuda_library.h>
#include <trireme/kernels/flatten_by_copies.h>
#include <trireme/kernels/flatten_check.h>
#include <trireme/kernels/once_per_device.h>
#include <trireme/kernels/real_of.h>
#include <trireme/kernels/span.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

// Torch's side of the CUDA kernels: arguments, device and stream. Compiled in every build, without
// CUDA headers.
namespace trireme::cuda {
namespace {

void launch(const FlattenTable& table, FlattenMove move, c10::Device device) {
  const char* failure = cuda_kernels()->launch_flatten(table, move, current_stream_handle(device));
  TORCH_CHECK(failure == nullptr,
              error_text("flatten", std::string("CUDA refused the kernel launch: ") + failure, {},
                         "An earlier kernel may be the cause: run with CUDA_LAUNCH_BLOCKING=1."));
}

void run(at::TensorList tensors, const at::Tensor& flat, FlattenMove move, double scale) {
  const c10::DeviceGuard guard(flat.device());
  const Span whole = span_of(flat);
  FlattenTable table;  // its arrays are filled only as far as they are used
  table.flat = whole.data;
  table.flat_dtype = real_of(whole.dtype);
  table.scale = scale;
  clear(table, 0);
  for (const at::Tensor& tensor : tensors) {
    const Span span = span_of(tensor);
    if (append(table, span.data, real_of(span.dtype), span.numel)) continue;
    launch(table, move, flat.device());
    clear(table, table.flat_begin[table.tensors]);
    append(table, span.data, real_of(span.dtype), span.numel);
  }
  launch(table, move, flat.device());
}

// Returns whether the kernels are there for that GPU. If not, warns once.
bool can_launch(c10::Device device) {
  static OncePerDevice devices;
  const char* reason =
      devices.why_not(device, [] { return why_no_cuda(&CudaKernels::why_no_flatten); });
  if (reason == nullptr) return true;
  TORCH_WARN_ONCE(error_text(
      "flatten", std::string(reason) + ": tensors are copied one by one on " + device.str(), {},
      kHowToGetCudaKernels));
  return false;
}

void flatten(at::TensorList inputs, const at::Tensor& flat, double scale) {
  if (!can_launch(flat.device())) return by_copies::flatten(inputs, flat, scale);
  check_flatten("flatten", inputs, flat);
  run(inputs, flat, FlattenMove::kFlatten, scale);
}

void flatten_accumulate(at::TensorList inputs, const at::Tensor& flat, double scale) {
  if (!can_launch(flat.device())) return by_copies::flatten_accumulate(inputs, flat, scale);
  check_flatten("flatten_accumulate", inputs, flat);
  run(inputs, flat, FlattenMove::kAccumulate, scale);
}

void unflatten(const at::Tensor& flat, at::TensorList outputs, double scale) {
  if (!can_launch(flat.device())) return by_copies::unflatten(flat, outputs, scale);
  check_flatten("unflatten", outputs, flat);
  run(outputs, flat, FlattenMove::kUnflatten, scale);
}

}  // namespace

TORCH_LIBRARY_IMPL(trireme, CUDA, m) {
  m.impl("flatten.into", &flatten);
  m.impl("flatten_accumulate", &flatten_accumulate);
  m.impl("unflatten", &unflatten);
}

}  // namespace trireme::cuda
