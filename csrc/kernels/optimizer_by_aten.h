#pragma once

#include <trireme/kernels/optimizer_rows.h>

// A step of one row in terms of ATen, some ten calls: for devices without a kernel of their own,
// for CUDA if nvcc was missing at build time, and for tensor subclasses. Same results but for
// rounding.
namespace trireme::by_aten {

// Exported for the tests.
TRIREME_API void step(const OptimizerRow& row, const AdamScalars& scalars);
TRIREME_API void step(const OptimizerRow& row, const SgdScalars& scalars);

}  // namespace trireme::by_aten
