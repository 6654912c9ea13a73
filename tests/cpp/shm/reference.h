#pragma once

#include <trireme/shm/reduce.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

// What reductions must compute, one element at a time by the plainest means, and elements to try
// them on.
namespace reference {

using trireme::shm::Dtype;
using trireme::shm::ReduceOp;
using Bytes = std::vector<unsigned char>;

inline constexpr Dtype kDtypes[] = {
    Dtype::kBool, Dtype::kU8,         Dtype::kI8,         Dtype::kU16,  Dtype::kI16,  Dtype::kU32,
    Dtype::kI32,  Dtype::kU64,        Dtype::kI64,        Dtype::kF16,  Dtype::kBF16, Dtype::kF32,
    Dtype::kF64,  Dtype::kComplexF32, Dtype::kComplexF64, Dtype::kBytes};
inline constexpr ReduceOp kOps[] = {ReduceOp::kSum,     ReduceOp::kAvg, ReduceOp::kPremulSum,
                                    ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax,
                                    ReduceOp::kBand,    ReduceOp::kBor, ReduceOp::kBxor};

inline bool is_integer(Dtype dtype) { return dtype >= Dtype::kU8 && dtype <= Dtype::kI64; }
inline bool is_complex(Dtype dtype) {
  return dtype == Dtype::kComplexF32 || dtype == Dtype::kComplexF64;
}

// How 16 bits share out: fp16 has 10 bits of fraction, bf16 7.
inline int fraction_bits(Dtype dtype) { return dtype == Dtype::kF16 ? 10 : 7; }

inline double from_16_bits(uint16_t bits, int fraction) {
  const int bias = (1 << (14 - fraction)) - 1;
  const int exponent = (bits & 0x7FFF) >> fraction;
  const int units = bits & ((1 << fraction) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 2 * bias + 1) {
    return units == 0 ? sign * std::numeric_limits<double>::infinity()
                      : std::numeric_limits<double>::quiet_NaN();
  }
  const int implied = exponent == 0 ? 0 : 1 << fraction;
  return sign * std::ldexp(units + implied, std::max(exponent, 1) - bias - fraction);
}

// To nearest even.
inline uint16_t to_16_bits(double value, int fraction) {
  const int bias = (1 << (14 - fraction)) - 1;
  const int infinity = (2 * bias + 1) << fraction;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  if (value == 0) return static_cast<uint16_t>(sign);
  int power = 0;
  std::frexp(value, &power);
  const int exponent = std::max(power - 1, 1 - bias);  // the leading bit's
  const double units = std::nearbyint(std::ldexp(std::fabs(value), fraction - exponent));
  // A normal number's units hold its leading bit, which is worth one exponent.
  const double rounded = std::ldexp(exponent + bias - 1, fraction) + units;
  return static_cast<uint16_t>(sign | static_cast<int>(std::min<double>(rounded, infinity)));
}

// Element i of real numbers of `dtype`, or of the parts of complex ones.
inline double read(Dtype dtype, const Bytes& bytes, int64_t i) {
  const auto value_at = [&](auto value) {
    std::memcpy(&value, bytes.data() + static_cast<size_t>(i) * sizeof(value), sizeof(value));
    return value;
  };
  switch (dtype) {
    case Dtype::kF16:
    case Dtype::kBF16:
      return from_16_bits(value_at(uint16_t{}), fraction_bits(dtype));
    case Dtype::kF32:
    case Dtype::kComplexF32:
      return value_at(float{});
    default:
      return value_at(double{});
  }
}

inline void write(Dtype dtype, Bytes& bytes, int64_t i, double number) {
  const auto put = [&](auto value) {
    std::memcpy(bytes.data() + static_cast<size_t>(i) * sizeof(value), &value, sizeof(value));
  };
  switch (dtype) {
    case Dtype::kF16:
    case Dtype::kBF16:
      return put(to_16_bits(number, fraction_bits(dtype)));
    case Dtype::kF32:
    case Dtype::kComplexF32:
      return put(static_cast<float>(number));
    default:
      return put(number);
  }
}

struct Reduction {
  Dtype dtype;
  ReduceOp op;
  int64_t numel;
  std::vector<Bytes> sources;
  std::vector<double> factors;  // empty unless the op is kPremulSum
};

// Rounded to C here and now, whatever the compiler would fuse or keep longer.
template <typename C>
C rounded(C value) {
  volatile C kept = value;
  return kept;
}

template <typename C>
C combined(ReduceOp op, C a, C b) {
  switch (op) {
    case ReduceOp::kProduct:
      return rounded<C>(a * b);
    case ReduceOp::kMin:
      return std::isnan(a) ? a : std::isnan(b) || b < a ? b : a;
    case ReduceOp::kMax:
      return std::isnan(a) ? a : std::isnan(b) || b > a ? b : a;
    default:
      return rounded<C>(a + b);
  }
}

// C: what is computed in.
template <typename C>
Bytes reduce_reals(const Reduction& job, int64_t numel) {
  Bytes result(job.sources[0].size());
  const auto ranks = job.sources.size();
  for (int64_t i = 0; i < numel; ++i) {
    C total = 0;
    for (size_t r = 0; r < ranks; ++r) {
      const C value = static_cast<C>(read(job.dtype, job.sources[r], i));
      const C term =
          job.factors.empty() ? value : rounded<C>(static_cast<C>(job.factors[r]) * value);
      total = r == 0 ? term : combined(job.op, total, term);
    }
    if (job.op == ReduceOp::kAvg) total = rounded<C>(total / static_cast<C>(ranks));
    write(job.dtype, result, i, total);
  }
  return result;
}

template <typename C>
Bytes multiply_complex(const Reduction& job) {
  Bytes result(job.sources[0].size());
  for (int64_t i = 0; i < job.numel; ++i) {
    C re = static_cast<C>(read(job.dtype, job.sources[0], 2 * i));
    C im = static_cast<C>(read(job.dtype, job.sources[0], 2 * i + 1));
    for (size_t r = 1; r < job.sources.size(); ++r) {
      const C a = re, b = im;
      const C c = static_cast<C>(read(job.dtype, job.sources[r], 2 * i));
      const C d = static_cast<C>(read(job.dtype, job.sources[r], 2 * i + 1));
      re = rounded<C>(rounded<C>(a * c) - rounded<C>(b * d));
      im = rounded<C>(rounded<C>(a * d) + rounded<C>(b * c));
    }
    write(job.dtype, result, 2 * i, re);
    write(job.dtype, result, 2 * i + 1, im);
  }
  return result;
}

template <typename T>
T combined_integers(ReduceOp op, T a, T b) {
  const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
  switch (op) {
    case ReduceOp::kProduct:
      return static_cast<T>(x * y);
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kBand:
      return static_cast<T>(x & y);
    case ReduceOp::kBor:
      return static_cast<T>(x | y);
    case ReduceOp::kBxor:
      return static_cast<T>(x ^ y);
    default:
      return static_cast<T>(x + y);
  }
}

// T: bool, or an integer.
template <typename T>
Bytes reduce_integers(const Reduction& job) {
  const auto value_at = [&](size_t rank, int64_t i) {
    std::conditional_t<std::is_same_v<T, bool>, unsigned char, T> value;
    std::memcpy(&value, job.sources[rank].data() + static_cast<size_t>(i) * sizeof(value),
                sizeof(value));
    return static_cast<T>(value);
  };
  Bytes result(job.sources[0].size());
  for (int64_t i = 0; i < job.numel; ++i) {
    T total = value_at(0, i);
    for (size_t r = 1; r < job.sources.size(); ++r) {
      total = combined_integers<T>(job.op, total, value_at(r, i));
    }
    if (job.op == ReduceOp::kAvg) {  // towards zero
      using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
      total = static_cast<T>(Wide{total} / static_cast<Wide>(job.sources.size()));
    }
    std::memcpy(result.data() + static_cast<size_t>(i) * sizeof(T), &total, sizeof(T));
  }
  return result;
}

inline Bytes reduce(const Reduction& job) {
  const bool product = job.op == ReduceOp::kProduct;
  switch (job.dtype) {
    case Dtype::kBool:
      return reduce_integers<bool>(job);
    case Dtype::kU8:
      return reduce_integers<uint8_t>(job);
    case Dtype::kI8:
      return reduce_integers<int8_t>(job);
    case Dtype::kU16:
      return reduce_integers<uint16_t>(job);
    case Dtype::kI16:
      return reduce_integers<int16_t>(job);
    case Dtype::kU32:
      return reduce_integers<uint32_t>(job);
    case Dtype::kI32:
      return reduce_integers<int32_t>(job);
    case Dtype::kU64:
      return reduce_integers<uint64_t>(job);
    case Dtype::kI64:
      return reduce_integers<int64_t>(job);
    case Dtype::kF64:
      return reduce_reals<double>(job, job.numel);
    case Dtype::kComplexF32:
      return product ? multiply_complex<float>(job) : reduce_reals<float>(job, 2 * job.numel);
    case Dtype::kComplexF64:
      return product ? multiply_complex<double>(job) : reduce_reals<double>(job, 2 * job.numel);
    case Dtype::kBytes:
      throw std::logic_error("bytes are not reduced");
    default:
      return reduce_reals<float>(job, job.numel);
  }
}

// The first byte that differs, a NaN being equal to a NaN; -1 if there is none.
inline int64_t first_difference(Dtype dtype, const unsigned char* got, const Bytes& expected) {
  const Bytes copied(got, got + expected.size());
  const bool integral = dtype == Dtype::kBool || is_integer(dtype);
  const auto element =
      static_cast<size_t>(trireme::shm::element_bytes(dtype)) / (is_complex(dtype) ? 2 : 1);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (copied[i] == expected[i]) continue;
    const auto number = static_cast<int64_t>(i / element);
    const bool both_nan = !integral && std::isnan(read(dtype, copied, number)) &&
                          std::isnan(read(dtype, expected, number));
    if (!both_nan) return static_cast<int64_t>(i);
  }
  return -1;
}

// Any bits for integers and truths, ordinary numbers for the others, and here and there a number at
// which arithmetic goes wrong.
inline Bytes draw(Dtype dtype, int64_t numel, std::mt19937& random) {
  constexpr double kDelicate[] = {0.0,     -0.0,     0x1p-14,   0x1p-24,   0x1.8p-24,      65504.0,
                                  65520.0, 0x1p-126, 0x1p-149,  0x1p-1022, 0x1.fffffep127, 0x1p-133,
                                  1e300,   HUGE_VAL, -HUGE_VAL, NAN};
  std::normal_distribution<double> normal;
  Bytes bytes(static_cast<size_t>(numel * trireme::shm::element_bytes(dtype)));
  if (dtype == Dtype::kBool || is_integer(dtype)) {
    for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
    if (dtype != Dtype::kBool) return bytes;
    for (auto& byte : bytes) byte = random() % 2 == 0 ? 0 : byte;
    return bytes;
  }
  for (int64_t i = 0; i < numel * (is_complex(dtype) ? 2 : 1); ++i) {
    const bool delicate = random() % 16 == 0;
    const double number = delicate ? kDelicate[random() % std::size(kDelicate)] : normal(random);
    const bool fits = dtype == Dtype::kF64 || dtype == Dtype::kComplexF64 ||
                      std::fabs(number) < 1e39 || !std::isfinite(number);
    write(dtype, bytes, i, fits ? number : 1.0);
  }
  return bytes;
}

}  // namespace reference
