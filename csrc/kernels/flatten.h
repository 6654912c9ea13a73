#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace trireme {

// Lays tensors one after another in a 1-D tensor, and back, with the scaling and the cast that a
// bucket needs in the same pass over memory. Registered as torch.ops.trireme.{flatten,
// flatten_accumulate, unflatten}; these functions call the operators, so profilers and fake tensors
// see both alike.
//
// Common to all: every tensor is real or complex fp32, fp64, fp16 or bf16, all on one device,
// non-overlapping and dense; each is taken in its own memory order (channels_last stays
// channels_last). A complex element counts as two reals; `flat` is 1-D contiguous and holds as many
// reals as the tensors together. Dtypes may differ within the list. Other tensors raise ValueError,
// or TypeError for a wrong dtype or layout. A tensor may be exactly its own slice of `flat`; any
// other overlap is undefined. Arithmetic and rounding are those of span.h, bitwise the same on
// every device except in the bits of a NaN. Written tensors have their version counters moved;
// there is no derivative.
//
// Cost: one pass. On the CPU shared among torch's intra-op threads; on CUDA one launch on the
// current stream of the tensors' device per 512 tensors, asynchronous.

// Sets flat = concatenation of cast(scale * inputs[i]).
TRIREME_API void flatten(at::TensorList inputs, const at::Tensor& flat, double scale = 1.0);

// Returns the concatenation of cast(scale * inputs[i]) as a new tensor of `dtype`, on the device of
// the inputs (the CPU if there are none).
TRIREME_API at::Tensor flatten(at::TensorList inputs, at::ScalarType dtype, double scale = 1.0);

// Sets flat += concatenation of cast(scale * inputs[i]): for a second gradient of the same
// parameter in one backward. No overlap at all here.
TRIREME_API void flatten_accumulate(at::TensorList inputs, const at::Tensor& flat,
                                    double scale = 1.0);

// Sets outputs[i] = cast(scale * its slice of flat).
TRIREME_API void unflatten(const at::Tensor& flat, at::TensorList outputs, double scale = 1.0);

}  // namespace trireme
