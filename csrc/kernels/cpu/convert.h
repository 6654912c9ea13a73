#pragma once

#include <trireme/common/export.h>

#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>
#include <string_view>

namespace trireme::cpu {

// The dtypes that the loops know, as indices of the tables below.
enum class Real : uint8_t { kFloat, kDouble, kHalf, kBFloat16 };
inline constexpr size_t kReals = 4;

// Sets dst[i] = cast(scale * src[i]). `dst` may be `src` if both have the same dtype.
using ConvertLoop = void (*)(void* dst, const void* src, int64_t numel, double scale);
// Sets dst[i] += src[i], of one dtype.
using AddLoop = void (*)(void* dst, const void* src, int64_t numel);

// The loops of one instruction set. All sets give the same bits, save those of a NaN.
struct ConvertLoops {
  std::string_view isa;
  std::array<std::array<ConvertLoop, kReals>, kReals> convert;  // [dst][src]
  std::array<AddLoop, kReals> add;
};

// Returns the loops that this processor can run, the fastest last; exported for the tests, which
// run each of them.
TRIREME_API c10::ArrayRef<ConvertLoops> supported_convert_loops();

}  // namespace trireme::cpu
