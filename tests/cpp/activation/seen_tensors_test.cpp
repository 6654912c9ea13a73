// Whether tensors are those of an earlier time.

#include <trireme/activation/seen_tensors.h>

#include <ATen/ATen.h>

#include "catch_torch.h"

namespace trireme::seen_tensors_test {

TEST_CASE("a tensor that was written, or is another one, is not as it was") {
  SeenTensors seen;
  const at::Tensor first = at::ones({3});
  const at::Tensor second = at::ones({3});
  seen.add(first);
  seen.add(second);
  CHECK(seen.size() == 2);
  CHECK(seen.is_unchanged(0, first));
  CHECK(seen.is_unchanged(1, second));
  CHECK(!seen.is_unchanged(0, second));
  CHECK(!seen.is_unchanged(2, first));
  first.add_(1);
  CHECK(!seen.is_unchanged(0, first));
  second.set_data(at::zeros({3}));
  CHECK(!seen.is_unchanged(1, second));
}

TEST_CASE("what is made where something was freed is another one") {
  SeenTensors seen;
  for (int round = 0; round < 50; ++round) {
    at::Tensor tensor = at::full({4}, round);
    if (round > 0) CHECK(!seen.is_unchanged(static_cast<size_t>(round - 1), tensor));
    seen.add(tensor);
  }
  const at::Tensor kept = at::ones({4});
  SeenTensors once;
  once.add(kept);
  for (int round = 0; round < 50; ++round) {
    kept.set_data(at::full({4}, round));  // frees what it had, or what the last round gave it
    CHECK(!once.is_unchanged(0, kept));
  }
}

}  // namespace trireme::seen_tensors_test
