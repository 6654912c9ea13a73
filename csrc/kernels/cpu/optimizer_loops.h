#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_scalars.h>

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace trireme::cpu {

// What there are loops for: parameter and gradient in memory. Others are converted first.
enum class LoopDtypes : uint8_t { kFloat, kDouble, kBFloat16, kBFloat16FloatGrad };
inline constexpr size_t kLoopDtypes = 4;

// One step of a segment on the calling thread. The gradient is not written, whatever the scalars
// say.
using AdamLoop = void (*)(const OptimizerSegment& segment, const AdamScalars& scalars);
using SgdLoop = void (*)(const OptimizerSegment& segment, const SgdScalars& scalars);

// The loops of one instruction set. All sets that have a fused multiply-add give the same bits.
struct OptimizerLoops {
  std::string_view isa;
  bool fuses;
  std::array<AdamLoop, kLoopDtypes> adam;
  std::array<SgdLoop, kLoopDtypes> sgd;
};

// Those that this processor can run, the fastest last; exported for the tests, which run each of
// them.
TRIREME_API std::span<const OptimizerLoops> supported_optimizer_loops();

}  // namespace trireme::cpu
