#include <trireme/strategies/sync_batch_norm/sync_batch_norm.h>

#include <trireme/bindings/bindings.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>

namespace trireme {

namespace py = pybind11;

void init_sync_batch_norm(py::module_& module) {
  using OptionalTensor = std::optional<at::Tensor>;
  const auto forward = [](BatchNormSync& self, const at::Tensor& input,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& running_mean, const OptionalTensor& running_var,
                          double momentum, double eps) {
    const auto tensor = [](const OptionalTensor& optional) {
      return optional.value_or(at::Tensor());
    };
    return self.forward({input, tensor(weight), tensor(bias), tensor(running_mean),
                         tensor(running_var), momentum, eps});
  };
  py::class_<BatchNormSync, std::shared_ptr<BatchNormSync>>(
      module, "BatchNormSync", "See csrc/strategies/sync_batch_norm/sync_batch_norm.h.")
      .def(py::init(torch::wrap_pybind_function([](std::shared_ptr<Communicator> communicator) {
             return std::make_shared<BatchNormSync>(std::move(communicator));
           })),
           py::arg("communicator"))
      .def("forward", torch::wrap_pybind_function_no_gil(forward), py::arg("input"), py::kw_only(),
           py::arg("weight"), py::arg("bias"), py::arg("running_mean"), py::arg("running_var"),
           py::arg("momentum"), py::arg("eps"));
}

}  // namespace trireme
