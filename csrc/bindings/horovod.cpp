#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/strategies/horovod/adasum.h>
#include <trireme/strategies/horovod/optimizer_gradients.h>

#include <torch/csrc/Exceptions.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

namespace py = pybind11;

using horovod::GradientOp;
using horovod::OptimizerGradients;
using horovod::OptimizerGradientsOptions;
using torch::wrap_pybind_function_no_gil;

namespace {

// Returns a callback that takes the GIL, and throws what the function raises: out of a backward,
// too.
template <typename Argument>
std::function<void(Argument)> calling(py::function function) {
  return [shared = shared_function(std::move(function))](const auto& argument) {
    const py::gil_scoped_acquire gil;
    const py::object given = py::cast(argument);
    PyObject* result = PyObject_CallOneArg(shared->ptr(), given.ptr());
    if (result == nullptr) {
      python_error error;
      error.persist();
      throw error;
    }
    Py_DECREF(result);
  };
}

std::shared_ptr<OptimizerGradients> make_gradients(NamedParameters parameters,
                                                   std::shared_ptr<Communicator> communicator,
                                                   OptimizerGradientsOptions options) {
  return std::make_shared<OptimizerGradients>(parameters, std::move(communicator),
                                              std::move(options));
}

}  // namespace

void init_horovod(py::module_& module) {
  py::enum_<GradientOp>(module, "GradientOp")
      .value("AVERAGE", GradientOp::kAverage)
      .value("SUM", GradientOp::kSum)
      .value("NONE", GradientOp::kNone);

  py::class_<OptimizerGradients, std::shared_ptr<OptimizerGradients>>(module, "OptimizerGradients")
      .def(py::init([](std::vector<std::string> names, std::vector<at::Tensor> parameters,
                       std::vector<bool> sparse, std::shared_ptr<Communicator> communicator,
                       GradientOp op, double predivide_factor, int64_t backward_passes_per_step,
                       std::optional<at::ScalarType> reduce_dtype, bool sparse_as_dense,
                       py::function refuse, py::function failed) {
             OptimizerGradientsOptions options;
             options.op = op;
             options.predivide_factor = predivide_factor;
             options.backward_passes_per_step = backward_passes_per_step;
             options.reduce_dtype = reduce_dtype;
             options.sparse_as_dense = sparse_as_dense;
             options.refuse = calling<const std::string&>(std::move(refuse));
             options.failed = calling<const std::string&>(std::move(failed));
             return wrap_pybind_function_no_gil(&make_gradients)(
                 {std::move(names), std::move(parameters), std::move(sparse)},
                 std::move(communicator), std::move(options));
           }),
           py::kw_only(), py::arg("names"), py::arg("parameters"), py::arg("sparse"),
           py::arg("communicator"), py::arg("op"), py::arg("predivide_factor"),
           py::arg("backward_passes_per_step"), py::arg("reduce_dtype"), py::arg("sparse_as_dense"),
           py::arg("refuse"), py::arg("failed"))
      .def("synchronize", wrap_pybind_function_no_gil(&OptimizerGradients::synchronize))
      .def("begin_step", wrap_pybind_function_no_gil(&OptimizerGradients::begin_step))
      .def("warning_of_step", &OptimizerGradients::warning_of_step)
      .def("set_steps_synchronize", &OptimizerGradients::set_steps_synchronize,
           py::arg("synchronize"))
      .def("check_zero_grad", wrap_pybind_function_no_gil(&OptimizerGradients::check_zero_grad))
      .def("set_backward_passes_per_step",
           wrap_pybind_function_no_gil(&OptimizerGradients::set_backward_passes_per_step),
           py::arg("passes"))
      .def("has_passes", wrap_pybind_function_no_gil(&OptimizerGradients::has_passes))
      .def("forget_passes", wrap_pybind_function_no_gil(&OptimizerGradients::forget_passes))
      .def("shadow_backward", wrap_pybind_function_no_gil(&OptimizerGradients::shadow_backward))
      .def("last_step", &OptimizerGradients::last_step)
      .def(
          "set_begun_callback",
          [](OptimizerGradients& self, std::optional<py::function> begun) {
            self.set_begun_callback(begun ? calling<int64_t>(*std::move(begun)) : nullptr);
          },
          py::arg("begun"))
      .def("end", wrap_pybind_function_no_gil(&OptimizerGradients::end), py::arg("why"));

  module.def("adasum", wrap_pybind_function_no_gil(&horovod::adasum), py::arg("parts"));
}

}  // namespace trireme
