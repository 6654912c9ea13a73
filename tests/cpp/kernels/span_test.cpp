#include <trireme/kernels/span.h>

#include <trireme/common/stream.h>
#include <trireme/kernels/cpu/convert.h>

#include <string>

#include "catch_torch.h"
#include "kernels/reference.h"

namespace trireme::span_test {

namespace {

using reference::draw;
using reference::first_difference;
using reference::kDtypes;
using trireme::scaled_add;
using trireme::scaled_copy;
using trireme::span_of;

constexpr int64_t kSpanLengths[] = {0, 1, 7, 8, 9, 15, 16, 17, 33, 64, 511, 512, 513, 1100};
constexpr double kScales[] = {1.0, 0.5, 1.0 / 3, -1e30};

std::string case_of(at::ScalarType dst, at::ScalarType src, int64_t numel, double scale) {
  return std::string(c10::toString(dst)) + " from " + c10::toString(src) + ", " +
         std::to_string(numel) + " elements, scale " + std::to_string(scale);
}

float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }

uint16_t converted(float value, at::ScalarType dtype) {
  uint16_t bits = 0;
  scaled_copy({&bits, dtype, 1}, {&value, at::kFloat, 1}, 1.0);
  return bits;
}

}  // namespace

TEST_CASE("every instruction set converts as the reference does") {
  for (const auto& loops : trireme::cpu::supported_convert_loops()) {
    INFO("instruction set " << loops.isa);
    for (size_t to = 0; to < 4; ++to) {
      for (size_t from = 0; from < 4; ++from) {
        for (const int64_t numel : kSpanLengths) {
          for (const double scale : kScales) {
            INFO(case_of(kDtypes[to], kDtypes[from], numel, scale));
            const at::Tensor src = draw(numel, kDtypes[from], 1);
            const at::Tensor got = at::empty({numel}, kDtypes[to]);
            const at::Tensor expected = at::empty({numel}, kDtypes[to]);
            loops.convert[to][from](got.data_ptr(), src.data_ptr(), numel, scale);
            reference::scaled_copy(expected, src, scale);
            REQUIRE(first_difference(got, expected) == -1);
          }
        }
      }
    }
  }
}

TEST_CASE("every instruction set adds as the reference does") {
  for (const auto& loops : trireme::cpu::supported_convert_loops()) {
    for (size_t t = 0; t < 4; ++t) {
      for (const int64_t numel : kSpanLengths) {
        INFO(loops.isa << ", " << case_of(kDtypes[t], kDtypes[t], numel, 1.0));
        const at::Tensor src = draw(numel, kDtypes[t], 2);
        const at::Tensor got = draw(numel, kDtypes[t], 3).flip(0);
        const at::Tensor expected = got.clone();
        loops.add[t](got.data_ptr(), src.data_ptr(), numel);
        reference::scaled_add(expected, src, 1.0);
        REQUIRE(first_difference(got, expected) == -1);
      }
    }
  }
}

TEST_CASE("rounding is to nearest even, with infinities and NaNs kept") {
  CHECK(converted(bits_to_float(0x3F808000), at::kBFloat16) == 0x3F80);  // tie, down to even
  CHECK(converted(bits_to_float(0x3F818000), at::kBFloat16) == 0x3F82);  // tie, up to even
  CHECK(converted(bits_to_float(0x3F808001), at::kBFloat16) == 0x3F81);
  CHECK(converted(bits_to_float(0x00008000), at::kBFloat16) == 0x0000);  // denormal tie
  CHECK(converted(bits_to_float(0x00018000), at::kBFloat16) == 0x0002);
  CHECK(converted(bits_to_float(0x7F7FFFFF), at::kBFloat16) == 0x7F80);  // overflow
  CHECK(converted(bits_to_float(0xFF800000), at::kBFloat16) == 0xFF80);
  CHECK((converted(bits_to_float(0x7F800001), at::kBFloat16) & 0x7FFF) > 0x7F80);
  CHECK((converted(bits_to_float(0xFFFFFFFF), at::kBFloat16) & 0x7FFF) > 0x7F80);

  CHECK(converted(1 + 0x1p-11f, at::kHalf) == 0x3C00);
  CHECK(converted(1 + 3 * 0x1p-11f, at::kHalf) == 0x3C02);
  CHECK(converted(0x1p-25f, at::kHalf) == 0x0000);
  CHECK(converted(0x1.8p-24f, at::kHalf) == 0x0002);
  CHECK(converted(-0x1p-24f, at::kHalf) == 0x8001);
  CHECK(converted(65519.99f, at::kHalf) == 0x7BFF);
  CHECK(converted(65520.0f, at::kHalf) == 0x7C00);
  CHECK((converted(bits_to_float(0x7F800001), at::kHalf) & 0x7FFF) > 0x7C00);
}

TEST_CASE("scale 1 within a dtype copies the bytes, whatever they mean") {
  for (const at::ScalarType dtype : kDtypes) {
    INFO(dtype);
    const at::Tensor src = draw(1001, dtype, 4);
    const at::Tensor got = at::zeros({1001}, dtype);
    scaled_copy(span_of(got), span_of(src), 1.0);
    CHECK(reference::same_bits(got, src));
  }
}

TEST_CASE("a span can be scaled in place") {
  for (const at::ScalarType dtype : kDtypes) {
    INFO(dtype);
    const at::Tensor values = draw(1001, dtype, 5);
    const at::Tensor expected = at::empty({1001}, dtype);
    reference::scaled_copy(expected, values, 0.3);
    scaled_copy(span_of(values), span_of(values), 0.3);
    CHECK(first_difference(values, expected) == -1);
    scaled_copy(span_of(values), span_of(values), 1.0);
    CHECK(first_difference(values, expected) == -1);
  }
}

TEST_CASE("scaled_add rounds the product, then the sum") {
  for (const at::ScalarType to : kDtypes) {
    for (const at::ScalarType from : kDtypes) {
      for (const double scale : kScales) {
        INFO(case_of(to, from, 1100, scale));
        const at::Tensor src = draw(1100, from, 6);
        const at::Tensor got = draw(1100, to, 7).flip(0);
        const at::Tensor expected = got.clone();
        scaled_add(span_of(got), span_of(src), scale);
        reference::scaled_add(expected, src, scale);
        CHECK(first_difference(got, expected) == -1);
      }
    }
  }
}

TEST_CASE("long spans are shared among threads without gap or overlap") {
  const reference::ThreeThreads threads;
  const int64_t numel = 3 * 32768 + 517;
  const at::Tensor src = draw(numel, at::kFloat, 8);
  const at::Tensor got = at::zeros({numel}, at::kBFloat16);
  const at::Tensor expected = at::zeros({numel}, at::kBFloat16);
  scaled_copy(span_of(got), span_of(src), 0.25);
  reference::scaled_copy(expected, src, 0.25);
  CHECK(first_difference(got, expected) == -1);
  scaled_add(span_of(got), span_of(src), 0.75);
  reference::scaled_add(expected, src, 0.75);
  CHECK(first_difference(got, expected) == -1);
}

TEST_CASE("span_of counts a complex number as two reals") {
  const at::Tensor complex = at::zeros({3, 4}, at::kComplexDouble);
  const trireme::Span span = span_of(complex);
  CHECK(span.data == complex.data_ptr());
  CHECK(span.dtype == at::kDouble);
  CHECK(span.numel == 24);
  CHECK(trireme::slice(span, 2, 5).data == static_cast<double*>(complex.data_ptr()) + 2);
  CHECK(trireme::slice(span, 2, 5).numel == 3);
}

TEST_CASE("spans of other dtypes or of unequal lengths are refused") {
  const at::Tensor floats = at::zeros({4});
  const at::Tensor longs = at::zeros({4}, at::kLong);
  CHECK_THROWS_WITH(scaled_copy(span_of(floats), span_of(longs), 1.0),
                    Catch::Contains("[span] got dtype Long, expected Float, Double, Half or "
                                    "BFloat16. Convert the tensor first."));
  CHECK_THROWS_AS(scaled_add(span_of(longs), span_of(floats), 1.0), c10::TypeError);
  CHECK_THROWS_WITH(scaled_copy(span_of(floats), span_of(floats.narrow(0, 0, 3)), 1.0),
                    Catch::Contains("[scaled_copy] got 3 elements, expected 4."));
  CHECK_THROWS_AS(scaled_add(span_of(floats), span_of(floats.narrow(0, 0, 3)), 1.0),
                  c10::ValueError);
}

TEST_CASE("the CPU has no stream") {
  CHECK(trireme::current_stream_handle(c10::Device(at::kCPU)) == nullptr);
}

}  // namespace trireme::span_test
