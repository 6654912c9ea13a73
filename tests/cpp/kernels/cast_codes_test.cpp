#include <trireme/kernels/cast_codes.h>

#include <ATen/ATen.h>

#include <limits>
#include <vector>

#include "catch_torch.h"

namespace trireme::cast_codes_test {

namespace {

Span span(const at::Tensor& tensor) { return span_of(tensor); }

// Bits, of whatever sign a zero or kind a NaN is.
bool same(const at::Tensor& got, const at::Tensor& expected) {
  return at::allclose(got, expected, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true);
}

}  // namespace

TEST_CASE("casts round, keep what they leave out, and add up in fp32") {
  const auto dtype = GENERATE(at::kHalf, at::kBFloat16);
  const int64_t numel = GENERATE(int64_t{1}, int64_t{511}, int64_t{512}, int64_t{513}, 70001);
  const double factor = GENERATE(1.0, 0.5);
  const at::Tensor values = at::randn({numel}), before = at::randn({numel}) * 1e-3;
  const at::Tensor residual = before.clone(), code = at::empty({numel}, dtype);

  encode(CastValues{values.const_data_ptr<float>()}, span(code), factor);
  CHECK(same(code, (values * factor).to(dtype)));

  encode(CastValues{values.const_data_ptr<float>(), residual.mutable_data_ptr<float>()}, span(code),
         factor);
  const at::Tensor sum = values + before;
  CHECK(same(code, (sum * factor).to(dtype)));
  CHECK(same(residual, sum - code.to(at::kFloat) / factor));

  const at::Tensor other = at::randn({numel}).to(dtype), mean = at::empty({numel});
  const std::vector<ConstSpan> codes{span(code), span(other)};
  decode(codes, span(mean), factor);
  CHECK(same(mean, (code.to(at::kFloat) + other.to(at::kFloat)) * factor));
}

TEST_CASE("a residual stays where a cast is no finite number") {
  const float inf = std::numeric_limits<float>::infinity();
  const at::Tensor values = at::tensor({1.0F, inf, -inf, std::nanf(""), 1e6F});
  const at::Tensor residual = at::full({5}, 0.25F), code = at::empty({5}, at::kHalf);
  encode(CastValues{values.const_data_ptr<float>(), residual.mutable_data_ptr<float>()}, span(code),
         1);
  CHECK(same(residual, at::tensor({0.0F, 0.25F, 0.25F, 0.25F, 0.25F})));
  CHECK_FALSE(at::isfinite(code.narrow(0, 1, 4)).any().item<bool>());
}

}  // namespace trireme::cast_codes_test
