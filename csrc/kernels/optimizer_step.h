#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_scalars.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace trireme {

// Makes one step of Adam, AdamW or SGD over many parameters: one pass over memory, in place.
//
// Common to all: a parameter is real or complex fp32, fp64, fp16 or bf16 (a complex element is two
// reals); its gradient has its dtype or is fp32; its states are fp32 and computed with in fp32,
// fp64 for an fp64 parameter, and the new value is rounded to the parameter once. fp32 and fp64
// results have the bits of torch's fused CPU optimizers wherever both fuse multiply and add.

// --- lists of tensors, on any devices ------------------------------------------------------------

// Lists whose entry i belongs to parameter i and has its shape. Memory that is not dense, or not in
// the order of the parameter's, is copied there and back.
struct AdamLists {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList exp_avgs;
  at::TensorList exp_avg_sqs;
  at::TensorList max_exp_avg_sqs;  // empty unless amsgrad
  // The number of steps of each parameter, this one included: tensors of one fp32 or fp64 each,
  // which are counted up here, on the CPU or (then fp32) on the device of a CUDA parameter; or else
  // numbers.
  at::TensorList steps;
  c10::ArrayRef<int64_t> step_numbers;
};

struct SgdLists {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList momentum_buffers;  // empty without momentum
};

// The factors of incoming gradients, applied without a pass of their own.
struct GradScale {
  double factor = 1;  // multiplies them, for instance a clipping coefficient
  // torch's GradScaler's: gradients are multiplied by 1 / grad_scale and, as by torch's fused
  // optimizers, stored; nothing at all happens if found_inf is not 0. One element each; absent if
  // undefined.
  at::Tensor grad_scale;
  at::Tensor found_inf;
};

// Step all parameters. Throw ValueError or TypeError naming the index of the parameter, before
// anything is written. Move the version counters of written tensors; record nothing for autograd.
//
// Cost on the CPU: one pass, shared among torch's intra-op threads; some 100 ns per parameter
// besides. On CUDA one launch per device, dtype, step counted on the host and 512 parameters on the
// current stream, asynchronous. Other devices, and tensor subclasses, take ATen's operators.
TRIREME_API void adam_step(const AdamLists& lists, const AdamStepOptions& options,
                           const GradScale& scale = {});
TRIREME_API void sgd_step(const SgdLists& lists, const SgdStepOptions& options,
                          const GradScale& scale = {});

// --- segments in CPU memory ----------------------------------------------------------------------

// The real dtypes of all segments of a call.
struct SegmentDtypes {
  at::ScalarType param;
  at::ScalarType grad;

  bool operator==(const SegmentDtypes&) const = default;
};

// Returns fp64 for fp64, else fp32; complex if the parameter is.
TRIREME_API at::ScalarType optimizer_state_dtype(at::ScalarType param);

// The base of optimizers that keep states of that dtype; states of torch's own have the dtype of
// their parameter.
class TRIREME_API KeepsWideStates {
 public:
  virtual ~KeepsWideStates() = default;
};

// Returns elements [begin, end).
TRIREME_API OptimizerSegment slice(const OptimizerSegment& segment, SegmentDtypes dtypes,
                                   int64_t begin, int64_t end);

// Step segments, for instance the shards of a rank, without dispatcher or checks: no state may be
// nullptr that the scalars ask for, and nothing may overlap. More than 32768 elements in all are
// shared among the threads of torch's intra-op pool.
TRIREME_API void adam_segments(c10::ArrayRef<OptimizerSegment> segments, SegmentDtypes dtypes,
                               const AdamScalars& scalars);
TRIREME_API void sgd_segments(c10::ArrayRef<OptimizerSegment> segments, SegmentDtypes dtypes,
                              const SgdScalars& scalars);

// Step one segment on the calling thread, for chunks that the caller has just made: a call costs
// some 20 ns besides its elements, and the scalars are those of the whole step. AdamW is Adam whose
// scalars come from options with decoupled_weight_decay. Adagrad comes within 1 ulp of torch's in
// an fp32 parameter.
TRIREME_API void adam_segment(const OptimizerSegment& segment, SegmentDtypes dtypes,
                              const AdamScalars& scalars);
TRIREME_API void sgd_segment(const OptimizerSegment& segment, SegmentDtypes dtypes,
                             const SgdScalars& scalars);
TRIREME_API void adagrad_segment(const OptimizerSegment& segment, SegmentDtypes dtypes,
                                 const AdagradScalars& scalars);
// Steps one row of a table by Adagrad with one state: exp_avg_sq[0] grows by the mean of the
// squares of the gradient, then param -= lr * grad / (sqrt(exp_avg_sq[0]) + eps). Within 1 ulp of
// the same in fp64, in an fp32 row whose squares are added up in several lanes of fp64.
TRIREME_API void rowwise_adagrad_row(const OptimizerSegment& row, SegmentDtypes dtypes,
                                     const AdagradScalars& scalars);

}  // namespace trireme
