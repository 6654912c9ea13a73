#include <trireme/kernels/cpu/optimizer_loops.h>

#include <trireme/common/isa.h>
#include <trireme/kernels/optimizer_math.h>

#include <cmath>
#include <tuple>

// Loops are written once, as plain C++ that compilers vectorise, and compiled once per instruction
// set. This file is compiled so that square roots set no errno, which would keep them out of
// vectors, and nothing is fused but what optimizer_math.h says.
namespace trireme::cpu {
namespace {

// Memory bounds the loops. 512-bit vectors are left out: on Zen 5 they make a step from memory 6 %
// longer, and only one from the nearest caches shorter. Lines are not prefetched: that is worth 5 %
// there, but costs 13 % on Zen 4.
using LoopIsas = std::tuple<Baseline
#if defined(__x86_64__)
                            ,
                            Avx2
#endif
                            >;

// Tells the compiler that iterations neither read nor write what another one writes.
#if defined(__clang__)
#define TRIREME_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TRIREME_INDEPENDENT _Pragma("GCC ivdep")
#endif

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

template <typename Isa, bool kL2, bool kAmsgrad, typename T>
TRIREME_INLINE void adam_loop(const OptimizerSegment& segment, AdamFactors<T> factors) {
  auto* param = static_cast<T*>(segment.param);
  const auto* grad = static_cast<const T*>(segment.grad);
  auto* exp_avg = static_cast<T*>(segment.exp_avg);
  auto* exp_avg_sq = static_cast<T*>(segment.exp_avg_sq);
  auto* max_exp_avg_sq = static_cast<T*>(segment.max_exp_avg_sq);
  TRIREME_INDEPENDENT
  for (int64_t i = 0; i < segment.numel; ++i) {
    AdamElement<T> e = {param[i], grad[i], exp_avg[i], exp_avg_sq[i], T{0}};
    if constexpr (kAmsgrad) e.max_exp_avg_sq = max_exp_avg_sq[i];
    update<Math<Isa>, kL2, kAmsgrad>(e, factors);
    param[i] = e.param;
    exp_avg[i] = e.exp_avg;
    exp_avg_sq[i] = e.exp_avg_sq;
    if constexpr (kAmsgrad) max_exp_avg_sq[i] = e.max_exp_avg_sq;
  }
}

template <typename Isa, typename T>
void adam(const OptimizerSegment& segment, const AdamScalars& scalars) {
  const AdamFactors<T> factors = factors_of<T>(scalars);
  const bool l2 = scalars.l2 != 0;
  Isa::run([&]() __attribute__((always_inline)) {
    if (l2 && scalars.amsgrad) return adam_loop<Isa, true, true>(segment, factors);
    if (l2) return adam_loop<Isa, true, false>(segment, factors);
    if (scalars.amsgrad) return adam_loop<Isa, false, true>(segment, factors);
    adam_loop<Isa, false, false>(segment, factors);
  });
}

template <typename Isa, bool kL2, bool kMomentum, bool kNesterov, typename T>
TRIREME_INLINE void sgd_loop(const OptimizerSegment& segment, SgdFactors<T> factors) {
  auto* param = static_cast<T*>(segment.param);
  const auto* grad = static_cast<const T*>(segment.grad);
  auto* momentum_buffer = static_cast<T*>(segment.exp_avg);
  TRIREME_INDEPENDENT
  for (int64_t i = 0; i < segment.numel; ++i) {
    SgdElement<T> e = {param[i], grad[i], T{0}};
    if constexpr (kMomentum) e.momentum_buffer = momentum_buffer[i];
    update<Math<Isa>, kL2, kMomentum, kNesterov>(e, factors);
    param[i] = e.param;
    if constexpr (kMomentum) momentum_buffer[i] = e.momentum_buffer;
  }
}

template <typename Isa, bool kL2, typename T>
TRIREME_INLINE void sgd_by_momentum(const OptimizerSegment& segment, const SgdScalars& scalars) {
  const SgdFactors<T> factors = factors_of<T>(scalars);
  if (segment.exp_avg == nullptr) return sgd_loop<Isa, kL2, false, false>(segment, factors);
  if (scalars.nesterov) return sgd_loop<Isa, kL2, true, true>(segment, factors);
  sgd_loop<Isa, kL2, true, false>(segment, factors);
}

template <typename Isa, typename T>
void sgd(const OptimizerSegment& segment, const SgdScalars& scalars) {
  Isa::run([&]() __attribute__((always_inline)) {
    if (scalars.l2 != 0) return sgd_by_momentum<Isa, true, T>(segment, scalars);
    sgd_by_momentum<Isa, false, T>(segment, scalars);
  });
}

template <typename Isa, typename T>
TRIREME_INLINE void adagrad_loop(const OptimizerSegment& segment, AdagradFactors<T> factors) {
  auto* param = static_cast<T*>(segment.param);
  const auto* grad = static_cast<const T*>(segment.grad);
  auto* sum = static_cast<T*>(segment.exp_avg_sq);
  TRIREME_INDEPENDENT
  for (int64_t i = 0; i < segment.numel; ++i) {
    AdagradElement<T> e = {param[i], grad[i], sum[i]};
    update<Math<Isa>>(e, factors);
    param[i] = e.param;
    sum[i] = e.sum;
  }
}

template <typename Isa, typename T>
void adagrad(const OptimizerSegment& segment, const AdagradScalars& scalars) {
  const AdagradFactors<T> factors = factors_of<T>(scalars);
  Isa::run([&]() __attribute__((always_inline)) { adagrad_loop<Isa>(segment, factors); });
}

// Squares are added up in fp64, in lanes, so that a row's step does not depend on the order of
// roundings.
template <typename Isa, typename T>
TRIREME_INLINE void rowwise_adagrad_loop(const OptimizerSegment& row, AdagradFactors<T> factors) {
  constexpr int64_t kLanes = 16;
  auto* param = static_cast<T*>(row.param);
  const auto* grad = static_cast<const T*>(row.grad);
  double lanes[kLanes] = {};
  const int64_t whole = row.numel / kLanes * kLanes;
  for (int64_t begin = 0; begin < whole; begin += kLanes) {
    TRIREME_INDEPENDENT
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(grad[begin + lane] * factors.grad_factor);
      lanes[lane] = Isa::multiply_add(value, value, lanes[lane]);
    }
  }
  for (int64_t i = whole; i < row.numel; ++i) {
    const auto value = static_cast<double>(grad[i] * factors.grad_factor);
    lanes[i - whole] = Isa::multiply_add(value, value, lanes[i - whole]);
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  auto& sum = *static_cast<T*>(row.exp_avg_sq);
  sum = static_cast<T>(static_cast<double>(sum) + lanes[0] / static_cast<double>(row.numel));
  const T step = factors.minus_lr / (std::sqrt(sum) + factors.eps);
  TRIREME_INDEPENDENT
  for (int64_t i = 0; i < row.numel; ++i)
    param[i] = Isa::multiply_add(grad[i] * factors.grad_factor, step, param[i]);
}

template <typename Isa, typename T>
void rowwise_adagrad(const OptimizerSegment& row, const AdagradScalars& scalars) {
  const AdagradFactors<T> factors = factors_of<T>(scalars);
  Isa::run([&]() __attribute__((always_inline)) { rowwise_adagrad_loop<Isa>(row, factors); });
}

// Returns whether multiply_add rounds once: (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 loses its last term
// in fp32.
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

template <typename Isa>
OptimizerLoops optimizer_loops_of(Isa /*isa*/) {
  return {Isa::kName,
          fuses<Isa>(),
          {&adam<Isa, float>, &adam<Isa, double>},
          {&sgd<Isa, float>, &sgd<Isa, double>},
          {&adagrad<Isa, float>, &adagrad<Isa, double>},
          {&rowwise_adagrad<Isa, float>, &rowwise_adagrad<Isa, double>}};
}

}  // namespace

std::span<const OptimizerLoops> supported_optimizer_loops() {
  static const auto loops =
      supported_loops<LoopIsas>([](auto isa) { return optimizer_loops_of(isa); });
  return loops;
}

}  // namespace trireme::cpu
