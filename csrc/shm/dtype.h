#pragma once

#include <cstdint>
#include <string_view>

namespace trireme::shm {

// The type of an element, in torch's words but without torch.
enum class Dtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kComplexF32,  // two fp32: real, imaginary
  kComplexF64,
  // Floats of one byte: moved, never reduced. Ranks that mix them up must be told.
  kF8E4M3,
  kF8E5M2,
  kF8E4M3Nuz,
  kF8E5M2Nuz,
  kF8E8M0,
  kBytes,  // anything else (packed or quantized integers), one byte each: moved, never reduced
};

// Returns whether elements are moved only.
constexpr bool is_bytes(Dtype dtype) { return dtype >= Dtype::kF8E4M3 && dtype <= Dtype::kBytes; }

// Returns 0 for a number that is no Dtype, as may come from another process.
constexpr int64_t element_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kU8:
    case Dtype::kI8:
    case Dtype::kF8E4M3:
    case Dtype::kF8E5M2:
    case Dtype::kF8E4M3Nuz:
    case Dtype::kF8E5M2Nuz:
    case Dtype::kF8E8M0:
    case Dtype::kBytes:
      return 1;
    case Dtype::kU16:
    case Dtype::kI16:
    case Dtype::kF16:
    case Dtype::kBF16:
      return 2;
    case Dtype::kU32:
    case Dtype::kI32:
    case Dtype::kF32:
      return 4;
    case Dtype::kU64:
    case Dtype::kI64:
    case Dtype::kF64:
    case Dtype::kComplexF32:
      return 8;
    case Dtype::kComplexF64:
      return 16;
  }
  return 0;
}

// Returns a dtype's name in torch, without "torch."; "unknown" for a number that is no Dtype.
constexpr std::string_view name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
      return "bool";
    case Dtype::kU8:
      return "uint8";
    case Dtype::kI8:
      return "int8";
    case Dtype::kU16:
      return "uint16";
    case Dtype::kI16:
      return "int16";
    case Dtype::kU32:
      return "uint32";
    case Dtype::kI32:
      return "int32";
    case Dtype::kU64:
      return "uint64";
    case Dtype::kI64:
      return "int64";
    case Dtype::kF16:
      return "float16";
    case Dtype::kBF16:
      return "bfloat16";
    case Dtype::kF32:
      return "float32";
    case Dtype::kF64:
      return "float64";
    case Dtype::kComplexF32:
      return "complex64";
    case Dtype::kComplexF64:
      return "complex128";
    case Dtype::kF8E4M3:
      return "float8_e4m3fn";
    case Dtype::kF8E5M2:
      return "float8_e5m2";
    case Dtype::kF8E4M3Nuz:
      return "float8_e4m3fnuz";
    case Dtype::kF8E5M2Nuz:
      return "float8_e5m2fnuz";
    case Dtype::kF8E8M0:
      return "float8_e8m0fnu";
    case Dtype::kBytes:
      return "bytes";
  }
  return "unknown";
}

}  // namespace trireme::shm
