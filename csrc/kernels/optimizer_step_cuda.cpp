#include <trireme/kernels/optimizer_step_cuda.h>

#include <trireme/common/error.h>
#include <trireme/common/stream.h>
#include <trireme/kernels/cuda_library.h>
#include <trireme/kernels/once_per_device.h>
#include <trireme/kernels/real_of.h>

#include <c10/core/DeviceGuard.h>

#include <string>

namespace trireme::cuda {
namespace {

const char* launch_step(const OptimizerTable& table, OptimizerReals reals,
                        const AdamScalars& scalars, void* stream) {
  return cuda_kernels()->launch_adam(table, reals, scalars, stream);
}
const char* launch_step(const OptimizerTable& table, OptimizerReals reals,
                        const SgdScalars& scalars, void* stream) {
  return cuda_kernels()->launch_sgd(table, reals, scalars, stream);
}

template <typename Scalars>
void launch(const OptimizerTable& table, const OptimizerBatch& batch, const Scalars& scalars) {
  const OptimizerReals reals = {real_of(batch.dtypes.param), real_of(batch.dtypes.grad)};
  const char* failure = launch_step(table, reals, scalars, current_stream_handle(batch.device));
  TORCH_CHECK(
      failure == nullptr,
      error_text("optimizer_step", std::string("CUDA refused the kernel launch: ") + failure, {},
                 "An earlier kernel may be the cause: run with CUDA_LAUNCH_BLOCKING=1."));
}

// Returns one fp32 number on the device, undefined if there is none.
at::Tensor number_on(c10::Device device, const at::Tensor& number) {
  if (!number.defined()) return number;
  return number.to(at::TensorOptions().device(device).dtype(at::kFloat), /*non_blocking=*/true);
}

template <typename Scalars>
void run(const OptimizerBatch& batch, const Scalars& scalars, const GradScale& scale) {
  const c10::DeviceGuard guard(batch.device);
  // These lie on the stream of the kernels, and so are alive until they have run.
  const at::Tensor grad_scale = number_on(batch.device, scale.grad_scale);
  const at::Tensor found_inf = number_on(batch.device, scale.found_inf);
  OptimizerTable table;  // its arrays are filled only as far as they are used
  table.grad_scale = grad_scale.defined() ? grad_scale.const_data_ptr<float>() : nullptr;
  table.found_inf = found_inf.defined() ? found_inf.const_data_ptr<float>() : nullptr;
  clear(table);
  for (size_t i = 0; i < batch.segments.size(); ++i) {
    const float* counter = batch.counters.empty() ? nullptr : batch.counters[i];
    if (append(table, batch.segments[i], counter)) continue;
    launch(table, batch, scalars);
    clear(table);
    append(table, batch.segments[i], counter);
  }
  launch(table, batch, scalars);
}

}  // namespace

bool can_step(c10::Device device) {
  static OncePerDevice devices;
  const char* reason =
      devices.why_not(device, [] { return why_no_cuda(&CudaKernels::why_no_optimizer_step); });
  if (reason == nullptr) return true;
  TORCH_WARN_ONCE(
      error_text("optimizer_step",
                 std::string(reason) + ": parameters are stepped one by one on " + device.str(), {},
                 kHowToGetCudaKernels));
  return false;
}

void step(const OptimizerBatch& batch, const AdamScalars& scalars, const GradScale& scale) {
  run(batch, scalars, scale);
}

void step(const OptimizerBatch& batch, const SgdScalars& scalars, const GradScale& scale) {
  run(batch, scalars, scale);
}

}  // namespace trireme::cuda
