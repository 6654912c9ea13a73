#include <trireme/kernels/cuda/kernel_image.h>
#include <trireme/kernels/cuda/optimizer_launch.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <type_traits>

// Compiled so that nothing is fused but what optimizer_math.h says: the bits are the CPU's.
namespace trireme::cuda {
namespace {

struct Numbers {
  static __device__ __forceinline__ float widen(float value) { return value; }
  static __device__ __forceinline__ double widen(double value) { return value; }
  static __device__ __forceinline__ float widen(__half value) { return __half2float(value); }
  static __device__ __forceinline__ float widen(__nv_bfloat16 value) {
    return __bfloat162float(value);
  }

  template <typename To, typename Value>
  static __device__ __forceinline__ To cast(Value value) {
    if constexpr (std::is_same_v<To, __half>) {
      return __float2half_rn(static_cast<float>(value));
    } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
      return __float2bfloat16_rn(static_cast<float>(value));
    } else {
      return static_cast<To>(value);
    }
  }

  static __device__ __forceinline__ float multiply_add(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
  }
  static __device__ __forceinline__ double multiply_add(double a, double b, double c) {
    return __fma_rn(a, b, c);
  }
  static __device__ __forceinline__ float root(float value) { return __fsqrt_rn(value); }
  static __device__ __forceinline__ double root(double value) { return __dsqrt_rn(value); }
};

template <typename Param>
using Computed = std::conditional_t<std::is_same_v<Param, double>, double, float>;

__device__ __forceinline__ bool is_skipped(const OptimizerTable& table) {
  return table.found_inf != nullptr && *table.found_inf != 0;
}

template <typename Scalars>
__device__ __forceinline__ void unscale(const OptimizerTable& table, Scalars& scalars) {
  if (table.grad_scale != nullptr) scalars.grad_factor /= static_cast<double>(*table.grad_scale);
}

template <bool kL2, bool kAmsgrad, typename Param, typename Grad>
__device__ __forceinline__ void adam_chunk(const OptimizerTable& table, int32_t segment,
                                           AdamScalars scalars) {
  using T = Computed<Param>;
  const T grad_factor = static_cast<T>(scalars.grad_factor);
  scalars.grad_factor = 1;
  const AdamOp<Numbers, kL2, kAmsgrad, T> op = {factors_of<T>(scalars), grad_factor};
  const auto chunk = chunk_of<Param, Grad, T, kAmsgrad ? 3 : 2>(
      table, segment, static_cast<int32_t>(blockIdx.x), scalars.write_grad);
  update_chunk(chunk, static_cast<int32_t>(threadIdx.x), op);
}

template <typename Param, typename Grad>
__global__ void __launch_bounds__(kOptimizerThreads)
    adam_kernel(const __grid_constant__ OptimizerTable table,
                const __grid_constant__ AdamScalars given) {
  if (is_skipped(table)) return;
  const int32_t segment = segment_of(table, static_cast<int32_t>(blockIdx.x));
  __shared__ AdamScalars scalars;
  if (threadIdx.x == 0) {  // powers in fp64 are expensive
    scalars = given;
    unscale(table, scalars);
    const float* counter = table.counter[segment];
    if (counter != nullptr) set_step(scalars, static_cast<double>(*counter));
  }
  __syncthreads();
  const bool l2 = scalars.l2 != 0;
  if (l2 && scalars.amsgrad) return adam_chunk<true, true, Param, Grad>(table, segment, scalars);
  if (l2) return adam_chunk<true, false, Param, Grad>(table, segment, scalars);
  if (scalars.amsgrad) return adam_chunk<false, true, Param, Grad>(table, segment, scalars);
  adam_chunk<false, false, Param, Grad>(table, segment, scalars);
}

template <bool kMomentum, bool kNesterov, typename Param, typename Grad>
__device__ __forceinline__ void sgd_chunk(const OptimizerTable& table, int32_t segment,
                                          SgdScalars scalars) {
  using T = Computed<Param>;
  const T grad_factor = static_cast<T>(scalars.grad_factor);
  scalars.grad_factor = 1;
  const SgdFactors<T> factors = factors_of<T>(scalars);
  const auto chunk = chunk_of<Param, Grad, T, kMomentum ? 1 : 0>(
      table, segment, static_cast<int32_t>(blockIdx.x), scalars.write_grad);
  const auto lane = static_cast<int32_t>(threadIdx.x);
  if (scalars.l2 != 0) {
    const SgdOp<Numbers, true, kMomentum, kNesterov, T> op = {factors, grad_factor};
    update_chunk(chunk, lane, op);
  } else {
    const SgdOp<Numbers, false, kMomentum, kNesterov, T> op = {factors, grad_factor};
    update_chunk(chunk, lane, op);
  }
}

template <typename Param, typename Grad>
__global__ void __launch_bounds__(kOptimizerThreads)
    sgd_kernel(const __grid_constant__ OptimizerTable table,
               const __grid_constant__ SgdScalars given) {
  if (is_skipped(table)) return;
  const int32_t segment = segment_of(table, static_cast<int32_t>(blockIdx.x));
  SgdScalars scalars = given;
  unscale(table, scalars);
  if (table.states[0][segment] == nullptr) {
    return sgd_chunk<false, false, Param, Grad>(table, segment, scalars);
  }
  if (scalars.nesterov) return sgd_chunk<true, true, Param, Grad>(table, segment, scalars);
  sgd_chunk<true, false, Param, Grad>(table, segment, scalars);
}

// --- launch --------------------------------------------------------------------------------------

struct AdamKernels {
  template <typename Param, typename Grad>
  static const void* of() {
    return reinterpret_cast<const void*>(&adam_kernel<Param, Grad>);
  }
};

struct SgdKernels {
  template <typename Param, typename Grad>
  static const void* of() {
    return reinterpret_cast<const void*>(&sgd_kernel<Param, Grad>);
  }
};

template <typename Kernels>
const void* kernel_for(OptimizerReals reals) {
  const bool same = reals.grad == reals.param;
  switch (reals.param) {
    case Real::kFloat:
      return Kernels::template of<float, float>();
    case Real::kDouble:
      return same ? Kernels::template of<double, double>() : Kernels::template of<double, float>();
    case Real::kHalf:
      return same ? Kernels::template of<__half, __half>() : Kernels::template of<__half, float>();
    case Real::kBFloat16:
      return same ? Kernels::template of<__nv_bfloat16, __nv_bfloat16>()
                  : Kernels::template of<__nv_bfloat16, float>();
  }
  return nullptr;
}

template <typename Scalars>
const char* launch(const void* kernel, const OptimizerTable& table, const Scalars& scalars,
                   void* stream) {
  const int32_t blocks = blocks_of(table);
  if (blocks == 0) return nullptr;
  void* arguments[] = {const_cast<OptimizerTable*>(&table), const_cast<Scalars*>(&scalars)};
  const cudaError_t error = cudaLaunchKernel(kernel, dim3(blocks), dim3(kOptimizerThreads),
                                             arguments, 0, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* why_no_optimizer_step() {
  return why_no_image(kernel_for<SgdKernels>({Real::kFloat, Real::kFloat}));
}

const char* launch_adam(const OptimizerTable& table, OptimizerReals reals,
                        const AdamScalars& scalars, void* stream) {
  return launch(kernel_for<AdamKernels>(reals), table, scalars, stream);
}

const char* launch_sgd(const OptimizerTable& table, OptimizerReals reals, const SgdScalars& scalars,
                       void* stream) {
  return launch(kernel_for<SgdKernels>(reals), table, scalars, stream);
}

}  // namespace trireme::cuda
