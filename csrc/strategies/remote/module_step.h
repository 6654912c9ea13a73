#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_spec.h>
#include <trireme/strategies/remote/value.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace trireme::remote {

// Write an optimizer as a value, and read it. Throw c10::ValueError for invalid options, and for
// RowwiseAdagrad, whose rows only tables have.
TRIREME_API Value to_value(const OptimizerSpec& spec);
TRIREME_API OptimizerSpec optimizer_of(const Value& value);

// The state of one caller's optimizer for one parameter.
struct StepState {
  at::Tensor first = {};
  at::Tensor second = {};
  int64_t steps = 0;
};

// Makes one step of a parameter in CPU memory, with any strides: in place, or, `afresh`, in new
// memory, so that graphs that use the old values keep them. Throws c10::NotImplementedError for a
// parameter that is not on the CPU or not floating, and c10::ValueError for a gradient of another
// shape.
TRIREME_API void step_parameter(const OptimizerSpec& spec, at::Tensor parameter,
                                const at::Tensor& gradient, StepState& state, bool afresh);

// Writes values of any dtype and strides into a parameter or a buffer, in the same two ways. Throws
// c10::ValueError for another shape.
TRIREME_API void write_values(at::Tensor target, const at::Tensor& values, const std::string& name,
                              bool afresh);

}  // namespace trireme::remote
