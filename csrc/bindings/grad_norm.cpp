#include <trireme/optim/grad_norm.h>

#include <trireme/bindings/bindings.h>
#include <trireme/strategies/zero/zero.h>

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// Returns the gradients' device; the CPU only if all are there, since single ones may be offloaded.
c10::Device device_of(const std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& gradient : gradients)
    if (!gradient.is_cpu()) return gradient.device();
  return c10::kCPU;
}

}  // namespace

void init_grad_norm(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  using Ranks = std::shared_ptr<Communicator>;
  py::class_<GradNormPart>(module, "GradNormPart")
      .def(py::init([](std::vector<at::Tensor> gradients, std::optional<c10::Device> device,
                       Ranks sharded_over, int64_t copies,
                       std::vector<at::Tensor> counted_elsewhere, Ranks stages) {
             const c10::Device where = device.value_or(device_of(gradients));
             return GradNormPart{std::move(gradients),         where,
                                 std::move(sharded_over),      copies,
                                 std::move(counted_elsewhere), std::move(stages)};
           }),
           py::arg("gradients"), py::kw_only(), py::arg("device") = std::nullopt,
           py::arg("sharded_over") = nullptr, py::arg("copies") = 1,
           py::arg("counted_elsewhere") = std::vector<at::Tensor>(), py::arg("stages") = nullptr)
      .def_static("of_zero",
                  wrap_pybind_function_no_gil(
                      [](const Zero& zero, const std::vector<int64_t>& parameters, Ranks stages) {
                        GradNormPart part = zero.gradients(parameters);
                        part.stages = std::move(stages);
                        return part;
                      }),
                  py::arg("zero"), py::arg("parameters"), py::arg("stages") = nullptr);
  module.def("clip_grad_norm_",
             wrap_pybind_function_no_gil([](const std::vector<GradNormPart>& parts, double max_norm,
                                            double norm_type, bool error_if_nonfinite) {
               return clip_grad_norm_(parts, {max_norm, norm_type, error_if_nonfinite});
             }),
             py::arg("parts"), py::arg("max_norm"), py::arg("norm_type"),
             py::arg("error_if_nonfinite"));
}

}  // namespace trireme
