#pragma once

#include <trireme/kernels/cuda/host_device_compat.h>
#include <trireme/kernels/optimizer_scalars.h>

#include <cmath>

// The update of one element, for every device. Operations have torch's order (its fused CPU
// kernels), and Math::multiply_add is used where its compiler fuses a product into a sum; so
// results have torch's bits, if the compiler fuses nothing else (-ffp-contract=off, -fmad=false).
namespace trireme {

// The scalars in T, the type computed in: fp64 for fp64 parameters, else fp32.
template <typename T>
struct AdamFactors {
  T grad_factor;  // sign included
  T shrink;
  T l2;
  T lerp_weight;
  T lerp_from_avg;  // positive: torch's lerp starts at its nearer end; as a T it keeps loops in
                    // vectors
  T beta2;
  T grad_sq_share;
  T root_scale;
  T eps;
  T minus_step_size;
};

template <typename T>
struct SgdFactors {
  T grad_factor;  // sign included
  T l2;
  T buffer_share;
  T grad_share;
  T momentum;
  T minus_lr;
};

template <typename T>
struct AdagradFactors {
  T grad_factor;
  T eps;
  T minus_lr;
};

template <typename T>
TRIREME_HOST_DEVICE AdamFactors<T> factors_of(const AdamScalars& scalars) {
  const T weight = static_cast<T>(1 - scalars.beta1);
  const bool from_avg = weight < static_cast<T>(0.5);
  return {static_cast<T>(scalars.grad_factor * scalars.grad_sign),
          static_cast<T>(scalars.shrink),
          static_cast<T>(scalars.l2),
          from_avg ? weight : weight - static_cast<T>(1),
          static_cast<T>(from_avg ? 1 : -1),
          static_cast<T>(scalars.beta2),
          static_cast<T>(1 - scalars.beta2),
          static_cast<T>(scalars.root_scale),
          static_cast<T>(scalars.eps),
          static_cast<T>(-scalars.step_size)};
}

template <typename T>
TRIREME_HOST_DEVICE SgdFactors<T> factors_of(const SgdScalars& scalars) {
  return {static_cast<T>(scalars.grad_factor * scalars.grad_sign),
          static_cast<T>(scalars.l2),
          static_cast<T>(scalars.buffer_share),
          static_cast<T>(scalars.grad_share),
          static_cast<T>(scalars.momentum),
          static_cast<T>(-scalars.lr)};
}

template <typename T>
TRIREME_HOST_DEVICE AdagradFactors<T> factors_of(const AdagradScalars& scalars) {
  return {static_cast<T>(scalars.grad_factor), static_cast<T>(scalars.eps),
          static_cast<T>(-scalars.lr)};
}

// Sets the scalars that change with the step.
TRIREME_HOST_DEVICE void set_step(AdamScalars& scalars, double step) {
  scalars.step_size = scalars.lr / (1 - std::pow(scalars.beta1, step));
  scalars.root_scale = std::sqrt(1 - std::pow(scalars.beta2, step));
}

// The parts of an update; each combination has a separate loop.
struct AdamParts {
  bool l2;
  bool amsgrad;
};
struct SgdParts {
  bool l2;
  bool momentum;
  bool nesterov;
};

template <typename T>
struct AdamElement {
  T param;
  T grad;
  T exp_avg;
  T exp_avg_sq;
  T max_exp_avg_sq;
};

template <typename Math, bool kL2, bool kAmsgrad, typename T>
TRIREME_HOST_DEVICE void update(AdamElement<T>& e, const AdamFactors<T>& f) {
  T grad = e.grad * f.grad_factor;
  // A factor of 0 would not do: an infinite parameter would become a NaN.
  if constexpr (kL2) grad = Math::multiply_add(e.param, f.l2, grad);
  e.exp_avg =
      Math::multiply_add(f.lerp_weight, grad - e.exp_avg, f.lerp_from_avg > 0 ? e.exp_avg : grad);
  e.exp_avg_sq = Math::multiply_add(grad * f.grad_sq_share, grad, e.exp_avg_sq * f.beta2);
  T mean_sq = e.exp_avg_sq;
  if constexpr (kAmsgrad) {
    e.max_exp_avg_sq = mean_sq <= e.max_exp_avg_sq ? e.max_exp_avg_sq : mean_sq;  // also a NaN
    mean_sq = e.max_exp_avg_sq;
  }
  const T denominator = Math::root(mean_sq) / f.root_scale + f.eps;
  e.param = e.param * f.shrink + e.exp_avg * f.minus_step_size / denominator;
}

template <typename T>
struct SgdElement {
  T param;
  T grad;
  T momentum_buffer;
};

template <typename Math, bool kL2, bool kMomentum, bool kNesterov, typename T>
TRIREME_HOST_DEVICE void update(SgdElement<T>& e, const SgdFactors<T>& f) {
  T grad = e.grad * f.grad_factor;
  if constexpr (kL2) grad = Math::multiply_add(e.param, f.l2, grad);
  if constexpr (kMomentum) {
    e.momentum_buffer = Math::multiply_add(grad, f.grad_share, e.momentum_buffer * f.buffer_share);
    grad = kNesterov ? Math::multiply_add(e.momentum_buffer, f.momentum, grad) : e.momentum_buffer;
  }
  e.param = Math::multiply_add(grad, f.minus_lr, e.param);
}

template <typename T>
struct AdagradElement {
  T param;
  T grad;
  T sum;  // adds up squares
};

template <typename Math, typename T>
TRIREME_HOST_DEVICE void update(AdagradElement<T>& e, const AdagradFactors<T>& f) {
  const T grad = e.grad * f.grad_factor;
  e.sum = Math::multiply_add(grad, grad, e.sum);
  e.param = e.param + grad * f.minus_lr / (Math::root(e.sum) + f.eps);
}

}  // namespace trireme
