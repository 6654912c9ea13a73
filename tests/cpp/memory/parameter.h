#pragma once

#include <trireme/memory/bucket_plan.h>

#include <c10/util/accumulate.h>

#include <utility>
#include <vector>

namespace trireme::test {

// What plans and stores are told of a parameter.
inline ParameterInfo parameter(std::vector<int64_t> sizes, at::ScalarType dtype = at::kFloat) {
  ParameterInfo info;
  info.name = 'p';
  info.numel = c10::multiply_integers(sizes);
  info.sizes = std::move(sizes);
  info.dtype = dtype;
  return info;
}

}  // namespace trireme::test
