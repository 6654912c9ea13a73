#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_spec.h>
#include <trireme/strategies/remote/value.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace trireme::remote {

// Returns how an optimizer travels, and reads it again. Throw c10::ValueError for options that are
// none, and for RowwiseAdagrad, whose rows only tables have.
TRIREME_API Value to_value(const OptimizerSpec& spec);
TRIREME_API OptimizerSpec optimizer_of(const Value& value);

// Is what the optimizer of one caller keeps of one parameter.
struct StepState {
  at::Tensor first = {};
  at::Tensor second = {};
  int64_t steps = 0;
};

// Makes one step of a parameter in CPU memory, of any layout: in place, or, `afresh`, in memory of
// its own, so that graphs which use the old values keep them. Throws c10::NotImplementedError for a
// parameter that is not on the CPU or not floating, and c10::ValueError for a gradient of another
// shape.
TRIREME_API void step_parameter(const OptimizerSpec& spec, at::Tensor parameter,
                                const at::Tensor& gradient, StepState& state, bool afresh);

// Writes values of any dtype and layout into a parameter or a buffer, in the same two ways. Throws
// c10::ValueError for another shape.
TRIREME_API void write_values(at::Tensor target, const at::Tensor& values, const std::string& name,
                              bool afresh);

}  // namespace trireme::remote
