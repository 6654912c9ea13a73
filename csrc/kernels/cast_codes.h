#pragma once

#include <trireme/kernels/span.h>

#include <span>

namespace trireme {

// fp32 values to be rounded to fp16 or bf16.
struct CastValues {
  const float* values;
  // What earlier codes left out, one per value, or null. It is added to the values, and then holds
  // what this code leaves out. It stays as it is where the sum or the code is no finite number.
  float* residual = nullptr;
};

// Sets code[i] = cast(factor * (values[i] + residual[i])). More than 32768 values are shared among
// the threads of torch's intra-op pool.
TRIREME_API void encode(const CastValues& from, Span code, double factor);

// Sets to[i] to `factor` times the sum of what the codes of several ranks say of it, in fp32, added
// up in their order.
TRIREME_API void decode(std::span<const ConstSpan> codes, Span to, double factor);

}  // namespace trireme
