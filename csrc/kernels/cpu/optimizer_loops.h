#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_scalars.h>

#include <array>
#include <span>
#include <string_view>

namespace trireme::cpu {

// Runs one step of a segment on the calling thread. Parameter, gradient and states are all of one
// dtype, fp32 or fp64; the gradient is not written, whatever the scalars say.
using AdamLoop = void (*)(const OptimizerSegment& segment, const AdamScalars& scalars);
using SgdLoop = void (*)(const OptimizerSegment& segment, const SgdScalars& scalars);
using AdagradLoop = void (*)(const OptimizerSegment& segment, const AdagradScalars& scalars);

// The loops of one instruction set, for fp32 and fp64. All sets that have a fused multiply-add give
// the same bits.
struct OptimizerLoops {
  std::string_view isa;
  bool fuses;
  std::array<AdamLoop, 2> adam;
  std::array<SgdLoop, 2> sgd;
  std::array<AdagradLoop, 2> adagrad;
  std::array<AdagradLoop, 2> rowwise_adagrad;  // steps one row
};

// Returns the loops that this processor can run, the fastest last; exported for the tests, which
// run each of them.
TRIREME_API std::span<const OptimizerLoops> supported_optimizer_loops();

}  // namespace trireme::cpu
