#include <trireme/bindings/bindings.h>
#include <trireme/common/error.h>
#include <trireme/kernels/optimizer_step.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

bool is_wrapped(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         py::hasattr(py::cast(tensor), "_local_tensor");
}

// The tensors that an optimizer keeps, one per parameter or none, by their name.
struct States {
  const char* name;
  Tensors& tensors;
};

py::object placements_of(const at::Tensor& tensor) { return py::cast(tensor).attr("placements"); }

at::Tensor local_part(const at::Tensor& tensor) {
  return is_wrapped(tensor) ? py::cast(tensor).attr("_local_tensor").cast<at::Tensor>() : tensor;
}

// Throws ValueError for the state of parameter `i` if other ranks have other parts of it.
void check_placements(const char* area, const States& states, size_t i,
                      const py::object& expected) {
  if (!is_wrapped(states.tensors[i])) return;
  const py::object got = placements_of(states.tensors[i]);
  TORCH_CHECK_VALUE(
      got.equal(expected),
      error_text(
          area,
          c10::str("got ", states.name, " with placements ", py::str(got).cast<std::string>(),
                   " for parameter ", i, ", expected ", py::str(expected).cast<std::string>()),
          {}, "Distribute the state as its parameter is, or load the optimizer's state anew."));
}

// Replaces DTensors by their local tensors where a parameter and its gradient have the same
// placements: an update is elementwise. Others stay as they are, for ATen's operators on DTensors.
void unwrap_rows(const char* area, Tensors& params, Tensors& grads,
                 std::initializer_list<States> all) {
  for (size_t i = 0; i < params.size(); ++i) {
    if (!is_wrapped(params[i]) || !is_wrapped(grads[i])) continue;
    const py::object placements = placements_of(params[i]);
    if (!placements.equal(placements_of(grads[i]))) continue;
    for (const States& states : all) {
      if (i >= states.tensors.size()) continue;
      check_placements(area, states, i, placements);
      states.tensors[i] = local_part(states.tensors[i]);
    }
    params[i] = local_part(params[i]);
    grads[i] = local_part(grads[i]);
  }
}

using OptionalTensor = std::optional<at::Tensor>;

GradScale scale_of(const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  return {1, grad_scale.value_or(at::Tensor()), found_inf.value_or(at::Tensor())};
}

void adam(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
          Tensors max_exp_avg_sqs, const Tensors& steps, const AdamStepOptions& options,
          const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  unwrap_rows(
      "adam_step", params, grads,
      {{"exp_avg", exp_avgs}, {"exp_avg_sq", exp_avg_sqs}, {"max_exp_avg_sq", max_exp_avg_sqs}});
  const py::gil_scoped_release no_gil;
  adam_step({params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, {}}, options,
            scale_of(grad_scale, found_inf));
}

void sgd(Tensors params, Tensors grads, Tensors momentum_buffers, const SgdStepOptions& options,
         const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  unwrap_rows("sgd_step", params, grads, {{"momentum_buffer", momentum_buffers}});
  const py::gil_scoped_release no_gil;
  sgd_step({params, grads, momentum_buffers}, options, scale_of(grad_scale, found_inf));
}

}  // namespace

void init_optim(py::module_& module) {
  py::class_<AdamStepOptions>(module, "AdamStepOptions")
      .def(py::init<>())
      .def_readwrite("lr", &AdamStepOptions::lr)
      .def_readwrite("beta1", &AdamStepOptions::beta1)
      .def_readwrite("beta2", &AdamStepOptions::beta2)
      .def_readwrite("eps", &AdamStepOptions::eps)
      .def_readwrite("weight_decay", &AdamStepOptions::weight_decay)
      .def_readwrite("decoupled_weight_decay", &AdamStepOptions::decoupled_weight_decay)
      .def_readwrite("amsgrad", &AdamStepOptions::amsgrad)
      .def_readwrite("maximize", &AdamStepOptions::maximize);

  py::class_<SgdStepOptions>(module, "SgdStepOptions")
      .def(py::init<>())
      .def_readwrite("lr", &SgdStepOptions::lr)
      .def_readwrite("momentum", &SgdStepOptions::momentum)
      .def_readwrite("dampening", &SgdStepOptions::dampening)
      .def_readwrite("weight_decay", &SgdStepOptions::weight_decay)
      .def_readwrite("nesterov", &SgdStepOptions::nesterov)
      .def_readwrite("maximize", &SgdStepOptions::maximize)
      .def_readwrite("first_step", &SgdStepOptions::first_step);

  using torch::wrap_pybind_function;
  module.def("adam_step", wrap_pybind_function(adam), py::kw_only(), py::arg("params"),
             py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
             py::arg("max_exp_avg_sqs"), py::arg("steps"), py::arg("options"),
             py::arg("grad_scale"), py::arg("found_inf"));
  module.def("sgd_step", wrap_pybind_function(sgd), py::kw_only(), py::arg("params"),
             py::arg("grads"), py::arg("momentum_buffers"), py::arg("options"),
             py::arg("grad_scale"), py::arg("found_inf"));
}

}  // namespace trireme
