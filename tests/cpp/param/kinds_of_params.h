#pragma once

#include <trireme/param/sharded_param.h>

#include <ATen/ATen.h>

#include <vector>

namespace trireme::test {

// Even and uneven rows, fewer rows than ranks, none; another dimension, no dimension; dtypes,
// casts.
inline std::vector<ShardedParamSpec> all_kinds() {
  return {{"even", {12, 2}},
          {"uneven", {5, 2}},
          {"few", {2}},
          {"none", {0, 3}},
          {"along", {3, 5, 2}, at::kFloat, 1},
          {"scalar", {}},
          {"double", {7}, at::kDouble},
          {"complex", {3}, at::kComplexFloat},
          {"cast", {7, 3}, at::kFloat, 0, at::kBFloat16},
          {"scalar_cast", {}, at::kFloat, 0, at::kBFloat16}};
}

// Whole numbers, which bf16 has, too.
inline at::Tensor value_of(const ShardedParamSpec& spec, int64_t times) {
  const int64_t numel = c10::multiply_integers(spec.sizes);
  return ((at::arange(numel) + 1) * times).view(spec.sizes).to(spec.dtype);
}

}  // namespace trireme::test
