#pragma once

#include <bit>
#include <cstdint>

// Forces inlining: only functions that are inlined into Isa::run (isa.h) are compiled for its
// instruction set.
#define TRIREME_INLINE [[gnu::always_inline]] inline

// fp16 and bf16 without torch. The conversions are exact or round to nearest even, know subnormals,
// infinities and NaNs, and have no branches, so that compilers vectorise them.
namespace trireme::cpu {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

TRIREME_INLINE float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

TRIREME_INLINE BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t nearest_even = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7FC0u : nearest_even)};
}

TRIREME_INLINE float to_float(Half value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7FFFu;
  // The fields in fp32's places read as a number 2^112 too small; lifting the exponent by 224 and
  // scaling by 2^-112 also takes fp16's infinity and NaN to fp32's.
  const float normal = std::bit_cast<float>((magnitude << 13) + (224u << 23)) * 0x1p-112f;
  // A subnormal counts units of 2^-24, which is fp32's last bit between 0.5 and 1.
  const float subnormal = std::bit_cast<float>(magnitude | (126u << 23)) - 0.5f;
  const float absolute = magnitude < 0x0400u ? subnormal : normal;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(absolute) | sign);
}

TRIREME_INLINE Half to_half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // 4 * |value|, with infinity for what is beyond fp16 by far.
  const float scaled = (std::bit_cast<float>(magnitude) * 0x1p+112f) * 0x1p-110f;
  // Adding a power of two whose last bit has the weight of fp16's last bit for this value lets the
  // addition round. Below fp16's normal numbers that weight stays the same.
  const uint32_t exponent = magnitude & 0x7F800000u;
  const uint32_t lifted = (exponent < (113u << 23) ? (113u << 23) : exponent) + (15u << 23);
  const auto sum = std::bit_cast<uint32_t>(std::bit_cast<float>(lifted) + scaled);
  // The added bit and the mantissa's carry meet in the exponent by addition.
  const uint32_t rounded = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
  const uint32_t absolute = magnitude > 0x7F800000u ? 0x7E00u : rounded;
  return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | absolute)};
}

}  // namespace trireme::cpu
