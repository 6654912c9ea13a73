#include <trireme/strategies/remote/module_step.h>

#include <trireme/common/error.h>
#include <trireme/common/resolved.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <optional>
#include <sstream>
#include <utility>
#include <vector>

namespace trireme::remote {
namespace {

std::string sizes_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

double number_at(const Values& items, size_t place) {
  const auto* number = place < items.size() ? items[place].get_if<double>() : nullptr;
  if (number == nullptr) refuse_message("with options of an optimizer of another form");
  return *number;
}

void check(const OptimizerSpec& spec) {
  const std::string complaint = complaint_about(spec);
  TORCH_CHECK_VALUE(complaint.empty(),
                    error_text("remote", complaint, {}, "Pass options that torch takes, too."));
  TORCH_CHECK_VALUE(!is_rowwise(spec),
                    error_text("remote", "got RowwiseAdagrad as optimizer of a module", {},
                               "Use Adagrad: the parameters of a module have no rows."));
}

at::Tensor real_and_contiguous(const at::Tensor& tensor) {
  const at::Tensor contiguous = resolved(tensor.detach()).contiguous();
  return contiguous.is_complex() ? at::view_as_real(contiguous) : contiguous;
}

at::Tensor zeros_like_state(const at::Tensor& values) {
  return at::zeros(values.sizes(), at::dtype(optimizer_state_dtype(values.scalar_type())));
}

}  // namespace

Value to_value(const OptimizerSpec& spec) {
  check(spec);
  Tuple tuple{{name_of(spec)}};
  for (const double number : options_of(spec)) tuple.items.emplace_back(number);
  return tuple;
}

OptimizerSpec optimizer_of(const Value& value) {
  const auto* tuple = value.get_if<Tuple>();
  const std::string* name =
      tuple != nullptr && !tuple->items.empty() ? tuple->items[0].get_if<std::string>() : nullptr;
  if (name == nullptr) refuse_message("with an optimizer that is none");
  std::vector<double> options;
  for (size_t i = 1; i < tuple->items.size(); ++i) options.push_back(number_at(tuple->items, i));
  const std::optional<OptimizerSpec> spec = optimizer_spec_of(*name, options);
  if (!spec) refuse_message("with an optimizer that is none");
  check(*spec);
  return *spec;
}

void step_parameter(const OptimizerSpec& spec, at::Tensor parameter, const at::Tensor& gradient,
                    StepState& state, bool afresh) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_NOT_IMPLEMENTED(
      parameter.is_cpu() && (parameter.is_floating_point() || parameter.is_complex()),
      error_text("remote", "got a parameter of " + parameter.toString() + " to step", {},
                 "Keep modules that others call in CPU memory."));
  TORCH_CHECK_VALUE(gradient.sizes() == parameter.sizes(),
                    error_text("remote",
                               "got a gradient of shape " + sizes_of(gradient) +
                                   ", expected that of its parameter, " + sizes_of(parameter),
                               {}, "Call zero_grad() after the parameter has changed."));
  at::Tensor values = real_and_contiguous(parameter);
  const bool in_place = !afresh && values.is_alias_of(parameter);
  if (!in_place && values.is_alias_of(parameter)) values = values.clone();
  at::Tensor own =
      real_and_contiguous(gradient.layout() == at::kStrided ? gradient : gradient.to_dense());
  if (own.scalar_type() != values.scalar_type() && own.scalar_type() != at::kFloat)
    own = own.to(values.scalar_type());
  const int64_t states = count_states(spec);
  if (states > 0 && (!state.first.defined() || state.first.sizes() != values.sizes()))
    state = {zeros_like_state(values), {}, 0};
  if (states > 1 && !state.second.defined()) state.second = zeros_like_state(values);
  OptimizerSegment segment;
  segment.param = values.mutable_data_ptr();
  segment.grad = own.mutable_data_ptr();
  segment.numel = values.numel();
  set_states(segment, spec,
             [&](int64_t i) { return (i == 0 ? state.first : state.second).mutable_data_ptr(); });
  step_segment(spec, segment, {values.scalar_type(), own.scalar_type()},
               {learning_rate_of(spec), ++state.steps, 1});
  if (in_place) {
    parameter.unsafeGetTensorImpl()->bump_version();
    return;
  }
  write_values(parameter, parameter.is_complex() ? at::view_as_complex(values) : values, "",
               afresh);
}

void write_values(at::Tensor target, const at::Tensor& values, const std::string& name,
                  bool afresh) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      values.sizes() == target.sizes(),
      error_text("remote",
                 "got " + sizes_of(values) + " as '" + name + "', expected " + sizes_of(target), {},
                 "Load what a module of the same shapes has saved."));
  if (!afresh) {
    target.copy_(values);
    return;
  }
  at::Tensor fresh = at::empty_like(target.detach());
  fresh.copy_(values);
  target.set_data(fresh);
}

}  // namespace trireme::remote
