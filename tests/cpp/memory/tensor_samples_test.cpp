// A few elements of each tensor: where they lie, whether they changed, and by which factor.

#include <trireme/memory/tensor_samples.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <catch_torch.h>
#include <functional>
#include <limits>
#include <set>
#include <vector>

namespace trireme::tensor_samples_test {

namespace {

constexpr at::ScalarType kAnyDtypes[] = {
    at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,      at::kComplexFloat, at::kComplexDouble,
    at::kByte,  at::kLong,   at::kBool, at::kFloat8_e4m3fn, at::kShort};
constexpr at::ScalarType kGradientDtypes[] = {at::kFloat,    at::kDouble,       at::kHalf,
                                              at::kBFloat16, at::kComplexFloat, at::kComplexDouble};

at::Tensor numbers(int64_t numel, at::ScalarType dtype) {
  return (at::arange(1, numel + 1, at::kDouble) / 7).sin().to(dtype);
}

bool sees(const at::Tensor& tensor, const std::function<void()>& write) {
  TensorSamples samples;
  samples.read(0, SampledMemory::of(tensor));
  write();
  return samples.is_changed(0, SampledMemory::of(tensor));
}

FactorRange factor_after(const std::vector<at::Tensor>& tensors,
                         const std::function<void(const at::Tensor&)>& write) {
  TensorSamples samples;
  for (size_t i = 0; i < tensors.size(); ++i) samples.read(i, SampledMemory::of(tensors[i]));
  CommonFactor factor;
  for (size_t i = 0; i < tensors.size(); ++i) {
    write(tensors[i]);
    samples.compare(i, SampledMemory::of(tensors[i]), factor);
  }
  return factor.range();
}

bool is_near(const FactorRange& range, double factor, double tolerance) {
  return range.least <= factor && factor <= range.most &&
         range.most - range.least <= 2 * tolerance * factor;
}

}  // namespace

TEST_CASE("the first, the last, and one of each equal stretch between them") {
  CHECK(sample_positions(0, 4, 1).empty());
  CHECK(sample_positions(1, 4, 1) == std::vector<int64_t>{0});
  CHECK(sample_positions(3, 4, 1) == std::vector<int64_t>{0, 1, 2});
  CHECK(sample_positions(4, 4, 1) == std::vector<int64_t>{0, 1, 2, 3});
  const int64_t million = int64_t{1} << 20;
  for (const int64_t numel : {int64_t{5}, int64_t{1001}, million, 3 * million + 1}) {
    const std::vector<int64_t> positions = sample_positions(numel, 4, 9);
    CAPTURE(numel);
    REQUIRE(static_cast<int64_t>(positions.size()) == 4 + 8 * (4 * numel / million));
    CHECK(positions == sample_positions(numel, 4, 9));
    CHECK(positions.front() == 0);
    CHECK(positions.back() == numel - 1);
    const auto count = static_cast<int64_t>(positions.size());
    for (int64_t i = 0; i < count; ++i) {
      CHECK(positions[static_cast<size_t>(i)] >= i * (numel / count));
      CHECK(positions[static_cast<size_t>(i)] <=
            (i + 1) * (numel / count) + std::min(i + 1, count));
    }
    CHECK(std::set<int64_t>(positions.begin(), positions.end()).size() == positions.size());
  }
  CHECK(sample_positions(million, 4, 9) != sample_positions(million, 4, 10));
}

TEST_CASE("a write to all elements is seen, in any dtype and layout") {
  for (const at::ScalarType dtype : kAnyDtypes) {
    CAPTURE(dtype);
    const at::Tensor tensor = at::ones({40, 3}).to(dtype);
    CHECK(sees(tensor, [&] { tensor.data().copy_(at::zeros({40, 3}).to(dtype)); }));
    CHECK_FALSE(sees(tensor, [&] { tensor.data().copy_(tensor.clone()); }));
  }
  const at::Tensor along_dim1 = at::ones({4, 6}).t();
  CHECK(sees(along_dim1, [&] { along_dim1.data().mul_(2); }));
  const at::Tensor scalar = at::ones({});
  CHECK(sees(scalar, [&] { scalar.data().add_(1); }));
}

TEST_CASE("NaN is no change; the sign of a zero is") {
  const at::Tensor strange = at::full({8}, std::numeric_limits<float>::quiet_NaN());
  CHECK_FALSE(sees(strange, [] {}));
  const at::Tensor zero = at::zeros({8});
  CHECK(sees(zero, [&] { zero.neg_(); }));
}

TEST_CASE("a write to a part that is repeated is seen sooner or later, where it lies") {
  const at::Tensor tensor = at::zeros({1 << 18});
  const at::Tensor part = tensor.narrow(0, 100000, 1 << 14);
  TensorSamples samples;
  int64_t times = 0;
  for (bool is_seen = false; !is_seen && times < 200; ++times) {
    samples.read(0, SampledMemory::of(tensor));
    part.add_(1);
    is_seen = samples.is_changed(0, SampledMemory::of(tensor));
  }
  CHECK(times > 1);  // else this shows nothing
  CHECK(times < 200);
}

TEST_CASE("of what is not there, or is another tensor by now, nothing is said") {
  const at::Tensor none, empty = at::zeros({0}), meta = at::zeros({3}, at::kMeta),
                         gaps = at::zeros({6}).slice(0, 0, 6, 2),
                         sparse = at::ones({2}).to_sparse(), three = at::ones({3});
  TensorSamples samples;
  const at::Tensor all[] = {none, empty, meta, gaps, sparse};
  for (size_t i = 0; i < std::size(all); ++i) {
    samples.read(i, SampledMemory::of(all[i]));
    CHECK_FALSE(samples.is_changed(i, SampledMemory::of(three)));
  }
  CHECK_FALSE(samples.is_changed(17, SampledMemory::of(three)));
  samples.read(2, SampledMemory::of(three));
  CHECK(samples.is_changed(2, SampledMemory::of(at::zeros({3}))));
  for (const at::Tensor& other : {none, at::zeros({4}), at::zeros({3}, at::kInt)})
    CHECK_FALSE(samples.is_changed(2, SampledMemory::of(other)));
  samples.clear();
  CHECK_FALSE(samples.is_changed(2, SampledMemory::of(at::zeros({3}))));
}

TEST_CASE("a part is sampled alone") {
  const at::Tensor tensor = at::arange(10, at::kFloat);
  const auto middle = [&] { return SampledMemory::of(tensor).part(3, 4); };
  TensorSamples samples;
  samples.read(0, middle());
  tensor[2] = -1;
  tensor[7] = -1;
  CHECK_FALSE(samples.is_changed(0, middle()));
  tensor[6] = -1;
  CHECK(samples.is_changed(0, middle()));
  CHECK(SampledMemory::of(tensor).part(7, 4).data == nullptr);
  CHECK(SampledMemory::of(tensor).part(7, 0).data == nullptr);
}

TEST_CASE("the factor of what was scaled, in each dtype that gradients have") {
  for (const at::ScalarType dtype : kGradientDtypes) {
    CAPTURE(dtype);
    const double roundoff = dtype == at::kHalf ? 4e-3 : dtype == at::kBFloat16 ? 3e-2 : 1e-6;
    const std::vector<at::Tensor> tensors{numbers(1000, dtype), numbers(3, dtype)};
    const auto scaled = [](double factor) {
      return [factor](const at::Tensor& tensor) { tensor.mul_(factor); };
    };
    CHECK(is_near(factor_after(tensors, scaled(0.37)), 0.37, roundoff));
    CHECK(is_near(factor_after(tensors, scaled(1)), 1, roundoff));
    CHECK((factor_after(tensors, scaled(0.5)) & factor_after(tensors, scaled(0.6))).is_empty());
    // twice, as a loss scale and a clip
    const FactorRange twice =
        factor_after(tensors, [](const at::Tensor& tensor) { tensor.mul_(1.0 / 1024).mul_(613); });
    CHECK(is_near(twice, 613.0 / 1024, 2 * roundoff));
  }
  CHECK(factor_after({numbers(9, at::kFloat)}, [](const at::Tensor& t) { t.neg_(); }).most < 0);
}

TEST_CASE("zeros, what is not finite, and few values say nothing of a factor") {
  const auto half = [](const at::Tensor& tensor) { tensor.mul_(0.5); };
  const FactorRange any;
  CHECK(factor_after({at::zeros({9})}, half) == any);
  CHECK(factor_after({at::full({9}, std::numeric_limits<double>::infinity())}, half) == any);
  CHECK(factor_after({at::full({9}, 3.0)}, half) == any);            // one magnitude
  CHECK(factor_after({at::arange(1, 3, at::kFloat)}, half) == any);  // two
  CHECK(factor_after({at::arange(1, 9)}, [](const at::Tensor& t) { t.mul_(2); }) == any);
  CHECK(factor_after({}, half) == any);
  const at::Tensor mixed = numbers(9, at::kFloat);
  mixed[0] = 0;
  mixed[1] = std::numeric_limits<float>::quiet_NaN();
  mixed[8] = -std::numeric_limits<float>::infinity();
  CHECK(is_near(factor_after({mixed, numbers(4, at::kFloat)}, half), 0.5, 1e-6));
  CHECK(factor_after({numbers(9, at::kFloat)}, [](const at::Tensor& t) { t.zero_(); }) == any);
  const at::Tensor tiny = numbers(9, at::kHalf).mul_(1e-6);  // rounded coarsely
  CHECK(factor_after({tiny}, half) == any);
}

TEST_CASE("what was changed element by element, or tensor by tensor, has no factor") {
  const FactorRange any;
  const std::vector<at::Tensor> tensors{numbers(1000, at::kFloat), numbers(50, at::kFloat)};
  CHECK(factor_after(tensors, [](const at::Tensor& t) { t.clamp_(-0.3, 0.3); }) == any);
  CHECK(factor_after(tensors, [](const at::Tensor& t) { t.add_(0.01); }) == any);
  CHECK(factor_after(tensors, [](const at::Tensor& t) {
          t.mul_(1.0 / static_cast<double>(t.numel()));
        }) == any);
}

}  // namespace trireme::tensor_samples_test
