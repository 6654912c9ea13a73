#pragma once

#include <ATen/Parallel.h>

#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "catch_torch.h"

// What the kernels must compute, one element at a time through c10's own conversions, and numbers
// to try it on.
namespace reference {

inline constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

inline double read(const at::Tensor& t, int64_t i) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return static_cast<const float*>(t.data_ptr())[i];
    case at::kDouble:
      return static_cast<const double*>(t.data_ptr())[i];
    case at::kHalf:
      return static_cast<float>(static_cast<const c10::Half*>(t.data_ptr())[i]);
    default:
      return static_cast<float>(static_cast<const c10::BFloat16*>(t.data_ptr())[i]);
  }
}

inline void write(const at::Tensor& t, int64_t i, double value) {
  switch (t.scalar_type()) {
    case at::kFloat:
      static_cast<float*>(t.data_ptr())[i] = static_cast<float>(value);
      break;
    case at::kDouble:
      static_cast<double*>(t.data_ptr())[i] = value;
      break;
    case at::kHalf:
      static_cast<c10::Half*>(t.data_ptr())[i] = static_cast<float>(value);
      break;
    default:
      static_cast<c10::BFloat16*>(t.data_ptr())[i] = static_cast<float>(value);
  }
}

// dst[i] = cast(scale * src[i]) over two 1-D tensors.
inline void scaled_copy(const at::Tensor& dst, const at::Tensor& src, double scale) {
  const bool in_double = dst.scalar_type() == at::kDouble || src.scalar_type() == at::kDouble;
  for (int64_t i = 0; i < src.numel(); ++i) {
    const double value = read(src, i);
    const float narrow = static_cast<float>(value) * static_cast<float>(scale);
    write(dst, i, in_double ? value * scale : narrow);
  }
}

// dst[i] += cast(scale * src[i]): the product is rounded, then the sum.
inline void scaled_add(const at::Tensor& dst, const at::Tensor& src, double scale) {
  const at::Tensor rounded = at::empty_like(dst);
  scaled_copy(rounded, src, scale);
  for (int64_t i = 0; i < dst.numel(); ++i) {
    const double a = read(dst, i);
    const double b = read(rounded, i);
    const float narrow = static_cast<float>(a) + static_cast<float>(b);
    write(dst, i, dst.scalar_type() == at::kDouble ? a + b : narrow);
  }
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

// The first element that differs in its bits, a NaN being equal to a NaN; -1 if there is none.
inline int64_t first_difference(const at::Tensor& got, const at::Tensor& expected) {
  const size_t bytes = got.element_size();
  const auto* a = static_cast<const char*>(got.data_ptr());
  const auto* b = static_cast<const char*>(expected.data_ptr());
  for (int64_t i = 0; i < got.numel(); ++i) {
    const bool both_nan = read(got, i) != read(got, i) && read(expected, i) != read(expected, i);
    if (!both_nan && std::memcmp(a + i * bytes, b + i * bytes, bytes) != 0) return i;
  }
  return -1;
}

// Numbers at which conversions go wrong: signs, ends of the ranges, denormals, ties of fp16 and of
// bf16, NaNs.
inline std::vector<double> delicate_numbers() {
  std::vector<double> numbers = {
      0.0,
      -0.0,
      1.0,
      0x1p-14,                // smallest normal fp16
      0x1p-24,                // smallest fp16
      0x1p-25,                // ties to 0
      0x1.8p-24,              // ties to 2 * 2^-24
      1 + 0x1p-11,            // ties down
      1 + 3 * 0x1p-11,        // ties up
      1 + 0x1p-11 + 0x1p-23,  // just above a tie
      65504,                  // largest fp16
      65519.99,               // rounds to it
      65520,                  // rounds to infinity
      1 + 0x1p-8,             // ties down in bf16
      1 + 3 * 0x1p-8,
      1 + 0x1p-8 + 0x1p-23,
      1 + 0x1p-24 + 0x1p-50,  // a tie of fp32, and a little
      std::numeric_limits<float>::max(),
      std::numeric_limits<double>::max(),
      std::numeric_limits<float>::denorm_min(),
      1e-40,
      std::numeric_limits<float>::infinity(),
      std::numeric_limits<double>::quiet_NaN(),
      std::bit_cast<float>(0x7F800001u),   // payload in the low bits
      std::bit_cast<float>(0x7FFFFFFFu)};  // rounds up to -0 if unguarded
  const size_t count = numbers.size();
  for (size_t i = 0; i < count; ++i) numbers.push_back(-numbers[i]);
  return numbers;
}

// For its lifetime, torch's intra-op pool has three threads, whatever the machine has.
class ThreeThreads {
 public:
  ThreeThreads() { at::set_num_threads(3); }
  ~ThreeThreads() { at::set_num_threads(before_); }
  ThreeThreads(const ThreeThreads&) = delete;
  ThreeThreads& operator=(const ThreeThreads&) = delete;

 private:
  int before_ = at::get_num_threads();
};

// `numel` numbers: the delicate ones first, then by turns ordinary ones and arbitrary bits.
inline at::Tensor draw(int64_t numel, at::ScalarType dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const at::Tensor numbers = at::empty({numel}, dtype);
  auto* bytes = static_cast<char*>(numbers.data_ptr());
  const std::vector<double> delicate = delicate_numbers();
  for (int64_t i = 0; i < numel; ++i) {
    const uint64_t bits = (static_cast<uint64_t>(random()) << 32) | random();
    if (i < static_cast<int64_t>(delicate.size())) {
      write(numbers, i, delicate[i]);
    } else if (i % 2 == 0) {
      write(numbers, i, normal(random));
    } else {
      std::memcpy(bytes + i * numbers.element_size(), &bits, numbers.element_size());
    }
  }
  return numbers;
}

}  // namespace reference
