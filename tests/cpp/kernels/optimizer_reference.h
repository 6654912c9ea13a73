#pragma once

#include <trireme/kernels/optimizer_step.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/reference.h"

// What the optimizers must compute, one element at a time, and lists of tensors to try it on.
namespace reference {

using trireme::AdamScalars;
using trireme::AdamStepOptions;
using trireme::SgdScalars;
using trireme::SgdStepOptions;

// Kept apart, so that no compiler makes one instruction of a product and a sum.
template <typename T>
[[gnu::noinline]] T times(T a, T b) {
  return a * b;
}

// a * b + c, rounded once or twice.
template <typename T>
T add_product(bool fuses, T a, T b, T c) {
  return fuses ? std::fma(a, b, c) : times(a, b) + c;
}

template <typename T>
struct AdamState {
  T param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

template <typename T>
void adam(AdamState<T>& s, T grad, const AdamScalars& scalars, bool fuses) {
  const auto t = [](double scalar) { return static_cast<T>(scalar); };
  grad = times(grad, t(scalars.grad_factor * scalars.grad_sign));
  if (scalars.l2 != 0) grad = add_product(fuses, s.param, t(scalars.l2), grad);
  const T weight = t(1 - scalars.beta1);
  s.exp_avg = weight < t(0.5) ? add_product(fuses, weight, grad - s.exp_avg, s.exp_avg)
                              : add_product(fuses, weight - 1, grad - s.exp_avg, grad);
  s.exp_avg_sq = add_product(fuses, times(grad, t(1 - scalars.beta2)), grad,
                             times(s.exp_avg_sq, t(scalars.beta2)));
  T mean = s.exp_avg_sq;
  if (scalars.amsgrad) mean = s.max_exp_avg_sq = std::max(s.max_exp_avg_sq, mean);
  const T denominator = std::sqrt(mean) / t(scalars.root_scale) + t(scalars.eps);
  s.param =
      times(s.param, t(scalars.shrink)) + times(s.exp_avg, t(-scalars.step_size)) / denominator;
}

template <typename T>
void sgd(T& param, T grad, T* momentum_buffer, const SgdScalars& scalars, bool fuses) {
  const auto t = [](double scalar) { return static_cast<T>(scalar); };
  grad = times(grad, t(scalars.grad_factor * scalars.grad_sign));
  if (scalars.l2 != 0) grad = add_product(fuses, param, t(scalars.l2), grad);
  if (momentum_buffer != nullptr) {
    T& buffer = *momentum_buffer;
    buffer =
        add_product(fuses, grad, t(scalars.grad_share), times(buffer, t(scalars.buffer_share)));
    grad = scalars.nesterov ? add_product(fuses, buffer, t(scalars.momentum), grad) : buffer;
  }
  param = add_product(fuses, grad, t(-scalars.lr), param);
}

// Every combination of what has a loop of its own, and both ends of the lerp.
inline std::vector<AdamStepOptions> adam_options() {
  std::vector<AdamStepOptions> all;
  for (const bool amsgrad : {false, true}) {
    for (const bool maximize : {false, true}) {
      for (const double weight_decay : {0.0, 0.1}) {
        for (const bool decoupled : {false, true}) {
          for (const double beta1 : {0.9, 0.3}) {
            all.push_back({1e-2, beta1, 0.99, 1e-8, weight_decay, decoupled, amsgrad, maximize});
          }
        }
      }
    }
  }
  return all;
}

inline std::vector<SgdStepOptions> sgd_options() {
  std::vector<SgdStepOptions> all;
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool maximize : {false, true}) {
      all.push_back({1e-2, 0, 0, weight_decay, false, maximize, false});
      all.push_back({1e-2, 0.9, 0, weight_decay, false, maximize, false});
      all.push_back({1e-2, 0.9, 0.3, weight_decay, false, maximize, false});
      all.push_back({1e-2, 0.9, 0, weight_decay, true, maximize, false});
    }
  }
  return all;
}

inline std::string text_of(const AdamStepOptions& o) {
  std::ostringstream out;
  out << "beta1 " << o.beta1 << ", weight decay " << o.weight_decay
      << (o.decoupled_weight_decay ? ", decoupled" : "") << (o.amsgrad ? ", amsgrad" : "")
      << (o.maximize ? ", maximize" : "");
  return out.str();
}

inline std::string text_of(const SgdStepOptions& o) {
  std::ostringstream out;
  out << "momentum " << o.momentum << ", dampening " << o.dampening << ", weight decay "
      << o.weight_decay << (o.nesterov ? ", nesterov" : "") << (o.maximize ? ", maximize" : "");
  return out.str();
}

// Numbers of many sizes.
inline at::Tensor magnitudes(at::IntArrayRef sizes, at::ScalarType dtype, uint64_t seed) {
  at::manual_seed(seed);
  const at::Tensor exponents = at::empty(sizes, at::kDouble).uniform_(-6, 1);
  return (at::randn(sizes, at::kDouble) * at::pow(10.0, exponents)).to(dtype);
}

// Parameters with gradients and Adam's states, one of each per shape.
struct AdamTensors {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;

  AdamTensors() = default;
  AdamTensors(const std::vector<std::vector<int64_t>>& shapes, at::ScalarType dtype) {
    uint64_t seed = 1;
    for (const std::vector<int64_t>& shape : shapes) add(magnitudes(shape, dtype, seed++));
  }

  void add(const at::Tensor& param) {
    const auto state = param.options().dtype(trireme::optimizer_state_dtype(param.scalar_type()));
    params.push_back(param);
    grads.push_back(at::zeros_like(param));
    exp_avgs.push_back(at::zeros_like(param, state));
    exp_avg_sqs.push_back(at::zeros_like(param, state));
    max_exp_avg_sqs.push_back(at::zeros_like(param, state));
    steps.push_back(at::zeros({}));
  }

  void draw_grads(uint64_t seed) {
    for (at::Tensor& grad : grads) {
      grad.copy_(magnitudes(grad.sizes(), c10::toRealValueType(grad.scalar_type()), seed++));
    }
  }

  AdamTensors clone() const {
    AdamTensors copy;
    for (auto list :
         {&AdamTensors::params, &AdamTensors::grads, &AdamTensors::exp_avgs,
          &AdamTensors::exp_avg_sqs, &AdamTensors::max_exp_avg_sqs, &AdamTensors::steps}) {
      for (const at::Tensor& tensor : this->*list) (copy.*list).push_back(tensor.clone());
    }
    return copy;
  }

  void step(const AdamStepOptions& options, const trireme::GradScale& scale = {}) const {
    trireme::adam_step({params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, {}}, options,
                       scale);
  }
};

}  // namespace reference
