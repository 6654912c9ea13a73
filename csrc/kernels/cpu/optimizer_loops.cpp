#include <trireme/kernels/cpu/optimizer_loops.h>

#include <trireme/common/half.h>
#include <trireme/common/isa.h>
#include <trireme/kernels/optimizer_math.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <vector>

// Loops are written once, as plain C++ that compilers vectorise, and compiled once per instruction
// set. This file is compiled so that square roots set no errno, which would keep them out of
// vectors, and nothing is fused but what optimizer_math.h says.
//
// What bounds them is memory, so 512-bit vectors are left out (on Zen 5 they take 6 % longer from
// memory), and lines are fetched some way ahead, which is worth 5 % there.
namespace trireme::cpu {
namespace {

using LoopIsas = std::tuple<Baseline
#if defined(__x86_64__)
                            ,
                            Avx2
#endif
                            >;

constexpr int64_t kBlock = 128;      // elements
constexpr int64_t kAhead = 4 * kBlock;  // from the beginning of a block to what is fetched with it
constexpr int64_t kLine = 64;        // bytes

template <typename T>
TRIREME_INLINE void fetch_block(T* block) {
  constexpr int64_t kStep = kLine / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < kBlock; i += kStep) __builtin_prefetch(block + i, !std::is_const_v<T>);
}

// Calls body(begin, end) for the blocks of [0, numel), and fetches what the streams hold further on.
template <typename Body, typename... Streams>
TRIREME_INLINE void for_blocks(int64_t numel, const Body& body, Streams*... streams) {
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    if (begin + kAhead + kBlock <= numel) (fetch_block(streams + begin + kAhead), ...);
    body(begin, std::min(begin + kBlock, numel));
  }
}

template <typename Isa>
struct Math {
  template <typename T>
  TRIREME_INLINE static T multiply_add(T a, T b, T c) {
    return Isa::multiply_add(a, b, c);
  }
  template <typename T>
  TRIREME_INLINE static T root(T value) {
    return std::sqrt(value);
  }
};

template <typename T>
TRIREME_INLINE T* typed(void* data) {
  return static_cast<T*>(data);
}

// What is loaded and stored as a struct is not vectorised.
using BFloat16Bits = uint16_t;

TRIREME_INLINE float widen(float value) { return value; }
TRIREME_INLINE double widen(double value) { return value; }
TRIREME_INLINE float widen(BFloat16Bits bits) { return to_float(BFloat16{bits}); }

TRIREME_INLINE void store(float& to, float value) { to = value; }
TRIREME_INLINE void store(double& to, double value) { to = value; }
TRIREME_INLINE void store(BFloat16Bits& to, float value) { to = to_bfloat16(value).bits; }

// Dtypes in memory, and the one that is computed in.
template <typename ParamType, typename GradType, typename ComputedType>
struct Types {
  using Param = ParamType;
  using Grad = GradType;
  using Computed = ComputedType;
};

template <typename Isa, typename Types, bool kL2, bool kAmsgrad, typename T>
TRIREME_INLINE void adam_loop(const OptimizerSegment& segment, const AdamFactors<T> factors) {
  auto* __restrict param = typed<typename Types::Param>(segment.param);
  const auto* __restrict grad = typed<typename Types::Grad>(segment.grad);
  T* __restrict exp_avg = typed<T>(segment.exp_avg);
  T* __restrict exp_avg_sq = typed<T>(segment.exp_avg_sq);
  T* __restrict max_exp_avg_sq = typed<T>(segment.max_exp_avg_sq);
  for (int64_t i = 0; i < segment.numel; ++i) {
    AdamElement<T> e = {widen(param[i]), widen(grad[i]), exp_avg[i], exp_avg_sq[i], T{0}};
    if constexpr (kAmsgrad) e.max_exp_avg_sq = max_exp_avg_sq[i];
    update<Math<Isa>, kL2, kAmsgrad>(e, factors);
    store(param[i], e.param);
    exp_avg[i] = e.exp_avg;
    exp_avg_sq[i] = e.exp_avg_sq;
    if constexpr (kAmsgrad) max_exp_avg_sq[i] = e.max_exp_avg_sq;
  }
}

template <typename Isa, typename Types>
void adam(const OptimizerSegment& segment, const AdamScalars& scalars) {
  const auto factors = factors_of<typename Types::Computed>(scalars);
  const bool l2 = scalars.l2 != 0;
  Isa::run([&]() __attribute__((always_inline)) {
    if (l2 && scalars.amsgrad) return adam_loop<Isa, Types, true, true>(segment, factors);
    if (l2) return adam_loop<Isa, Types, true, false>(segment, factors);
    if (scalars.amsgrad) return adam_loop<Isa, Types, false, true>(segment, factors);
    adam_loop<Isa, Types, false, false>(segment, factors);
  });
}

template <typename Isa, typename Types, bool kL2, bool kMomentum, bool kNesterov, typename T>
TRIREME_INLINE void sgd_loop(const OptimizerSegment& segment, const SgdFactors<T> factors) {
  auto* __restrict param = typed<typename Types::Param>(segment.param);
  const auto* __restrict grad = typed<typename Types::Grad>(segment.grad);
  T* __restrict momentum_buffer = typed<T>(segment.exp_avg);
  for (int64_t i = 0; i < segment.numel; ++i) {
    SgdElement<T> e = {widen(param[i]), widen(grad[i]), T{0}};
    if constexpr (kMomentum) e.momentum_buffer = momentum_buffer[i];
    update<Math<Isa>, kL2, kMomentum, kNesterov>(e, factors);
    store(param[i], e.param);
    if constexpr (kMomentum) momentum_buffer[i] = e.momentum_buffer;
  }
}

template <typename Isa, typename Types, bool kL2>
TRIREME_INLINE void sgd_loops(const OptimizerSegment& segment, const SgdScalars& scalars) {
  const auto factors = factors_of<typename Types::Computed>(scalars);
  if (segment.exp_avg == nullptr) {
    return sgd_loop<Isa, Types, kL2, false, false>(segment, factors);
  }
  if (scalars.nesterov) return sgd_loop<Isa, Types, kL2, true, true>(segment, factors);
  sgd_loop<Isa, Types, kL2, true, false>(segment, factors);
}

template <typename Isa, typename Types>
void sgd(const OptimizerSegment& segment, const SgdScalars& scalars) {
  Isa::run([&]() __attribute__((always_inline)) {
    if (scalars.l2 != 0) return sgd_loops<Isa, Types, true>(segment, scalars);
    sgd_loops<Isa, Types, false>(segment, scalars);
  });
}

// Whether multiply_add rounds once: (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 loses its last term in fp32.
template <typename Isa>
bool fuses() {
  bool found = false;
  Isa::run([&]() __attribute__((always_inline)) {
    volatile float factor = 1 + 0x1p-12f;
    const float a = factor;
    found = Isa::multiply_add(a, a, -(1 + 0x1p-11f)) != 0;
  });
  return found;
}

// In the order of LoopDtypes.
template <typename Isa, typename... AllTypes>
OptimizerLoops loops_of() {
  return {Isa::kName, fuses<Isa>(), {&adam<Isa, AllTypes>...}, {&sgd<Isa, AllTypes>...}};
}

template <typename... Isa>
std::vector<OptimizerLoops> supported_among(std::type_identity<std::tuple<Isa...>>) {
  std::vector<OptimizerLoops> found;
  ((Isa::supported()
        ? found.push_back(
              loops_of<Isa, Types<float, float, float>, Types<double, double, double>,
                       Types<BFloat16Bits, BFloat16Bits, float>, Types<BFloat16Bits, float, float>>())
        : void()),
   ...);
  return found;
}

}  // namespace

std::span<const OptimizerLoops> supported_optimizer_loops() {
  static const std::vector<OptimizerLoops> loops = supported_among(std::type_identity<LoopIsas>{});
  return loops;
}

}  // namespace trireme::cpu
