#include <trireme/kernels/cuda/flatten_launch.h>
#include <trireme/kernels/cuda/kernel_image.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <type_traits>

namespace trireme::cuda {
namespace {

// --- arithmetic ----------------------------------------------------------------------------------
// Follows span.h. The _rn intrinsics are never fused, so sums have the bits of the CPU's.

template <typename Dst, typename Src>
using Compute =
    std::conditional_t<std::is_same_v<Dst, double> || std::is_same_v<Src, double>, double, float>;

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Dst, typename Value>
__device__ __forceinline__ Dst cast(Value value) {
  if constexpr (std::is_same_v<Dst, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<Dst, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else {
    return static_cast<Dst>(value);
  }
}

__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double sum(double a, double b) { return __dadd_rn(a, b); }

struct CopyBits {
  static constexpr bool kReadsDst = false;
  template <typename T>
  __device__ T operator()(T value, T) const {
    return value;
  }
};

template <typename Dst, typename Src, bool kAdd>
struct ScaleCast {
  static constexpr bool kReadsDst = kAdd;
  Compute<Dst, Src> scale;
  __device__ Dst operator()(Src value, Dst old) const {
    const Dst scaled = cast<Dst>(product(static_cast<Compute<Dst, Src>>(widen(value)), scale));
    if constexpr (kAdd) return cast<Dst>(sum(widen(old), widen(scaled)));
    return scaled;
  }
};

// --- kernels -------------------------------------------------------------------------------------

template <size_t kBytes>
using Bits =
    std::conditional_t<kBytes == 8, uint64_t, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>;

// Moves one chunk between flat, of type Flat, and a tensor of type Tensor.
template <FlattenMove kMove, typename Flat, typename Tensor>
__device__ __forceinline__ void move_chunk(const FlattenTable& table, const Chunk& chunk) {
  constexpr bool kOut = kMove == FlattenMove::kUnflatten;
  constexpr bool kAdd = kMove == FlattenMove::kAccumulate;
  using Dst = std::conditional_t<kOut, Tensor, Flat>;
  using Src = std::conditional_t<kOut, Flat, Tensor>;
  Flat* flat = static_cast<Flat*>(table.flat) + table.flat_begin[chunk.tensor] + chunk.begin;
  Tensor* tensor = static_cast<Tensor*>(table.data[chunk.tensor]) + chunk.begin;
  void* dst = kOut ? static_cast<void*>(tensor) : flat;
  const void* src = kOut ? static_cast<const void*>(flat) : tensor;

  if constexpr (std::is_same_v<Dst, Src> && !kAdd) {
    if (table.scale == 1.0) {  // arithmetic would change the bits of a NaN
      using Same = Bits<sizeof(Dst)>;
      move_elements(static_cast<Same*>(dst), static_cast<const Same*>(src), chunk.numel,
                    threadIdx.x, CopyBits{});
      return;
    }
  }
  const ScaleCast<Dst, Src, kAdd> op{static_cast<Compute<Dst, Src>>(table.scale)};
  move_elements(static_cast<Dst*>(dst), static_cast<const Src*>(src), chunk.numel, threadIdx.x, op);
}

// Leaves a thread 64 registers: enough for its loads in flight, where the compiler alone would
// spill some.
constexpr int kBlocksPerMultiprocessor = 4;

template <FlattenMove kMove, typename Flat>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    flatten_kernel(const __grid_constant__ FlattenTable table) {
  const Chunk chunk = locate(table, static_cast<int32_t>(blockIdx.x));
  switch (table.dtype[chunk.tensor]) {
    case Real::kFloat:
      return move_chunk<kMove, Flat, float>(table, chunk);
    case Real::kDouble:
      return move_chunk<kMove, Flat, double>(table, chunk);
    case Real::kHalf:
      return move_chunk<kMove, Flat, __half>(table, chunk);
    case Real::kBFloat16:
      return move_chunk<kMove, Flat, __nv_bfloat16>(table, chunk);
  }
}

// --- launch --------------------------------------------------------------------------------------

using Kernel = void (*)(FlattenTable);

template <FlattenMove kMove>
Kernel kernel_for(Real flat_dtype) {
  switch (flat_dtype) {
    case Real::kFloat:
      return &flatten_kernel<kMove, float>;
    case Real::kDouble:
      return &flatten_kernel<kMove, double>;
    case Real::kHalf:
      return &flatten_kernel<kMove, __half>;
    case Real::kBFloat16:
      return &flatten_kernel<kMove, __nv_bfloat16>;
  }
  return nullptr;
}

Kernel kernel_for(FlattenMove move, Real flat_dtype) {
  switch (move) {
    case FlattenMove::kFlatten:
      return kernel_for<FlattenMove::kFlatten>(flat_dtype);
    case FlattenMove::kAccumulate:
      return kernel_for<FlattenMove::kAccumulate>(flat_dtype);
    case FlattenMove::kUnflatten:
      return kernel_for<FlattenMove::kUnflatten>(flat_dtype);
  }
  return nullptr;
}

}  // namespace

const char* why_no_flatten() {
  return why_no_image(
      reinterpret_cast<const void*>(kernel_for(FlattenMove::kFlatten, Real::kFloat)));
}

const char* launch_flatten(const FlattenTable& table, FlattenMove move, void* stream) {
  const int32_t blocks = blocks_of(table);
  if (blocks == 0) return nullptr;
  void* arguments[] = {const_cast<FlattenTable*>(&table)};
  const cudaError_t error = cudaLaunchKernel(
      reinterpret_cast<const void*>(kernel_for(move, table.flat_dtype)), dim3(blocks),
      dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace trireme::cuda
