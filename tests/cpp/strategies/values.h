#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace trireme::test {

// Parameters, gradients or outputs; undefined where there is none.
using Values = std::vector<at::Tensor>;

// How many differ by shape, dtype or more than the tolerances; an `rtol` of 0 means bit for bit.
inline int64_t count_unlike(const Values& found, const Values& expected, double rtol = 1e-5,
                            double atol = 1e-6) {
  int64_t unlike = found.size() == expected.size() ? 0 : 1;
  for (size_t i = 0; i < found.size() && i < expected.size(); ++i) {
    if (!found[i].defined() || !expected[i].defined()) {
      unlike += found[i].defined() != expected[i].defined();
    } else if (found[i].sizes() != expected[i].sizes() ||
               found[i].scalar_type() != expected[i].scalar_type()) {
      ++unlike;
    } else {
      unlike += rtol > 0 ? !at::allclose(found[i], expected[i], rtol, atol)
                         : !at::equal(found[i], expected[i]);
    }
  }
  return unlike;
}

}  // namespace trireme::test
