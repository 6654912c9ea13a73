#include <trireme/bindings/bindings.h>
#include <trireme/bindings/python_values.h>
#include <trireme/comm/packed_value.h>

#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <string>

namespace trireme {

namespace py = pybind11;

using torch::wrap_pybind_function;

void init_values(py::module_& module) {
  module.def("pack_value",
             wrap_pybind_function([](const py::object& value, const std::string& area,
                                     const std::string& name, int64_t rank, int64_t world) {
               const values::ValueOrigin origin{area.c_str(), name.c_str(), {rank, world}};
               const values::Value given = values::value_of_python(value, origin);
               const py::gil_scoped_release released;
               return values::pack_value(given, origin);
             }),
             py::arg("value"), py::arg("area"), py::arg("name"), py::arg("rank"), py::arg("world"));
  module.def("unpack_value", wrap_pybind_function([](const at::Tensor& bytes) {
               values::Value value;
               {
                 const py::gil_scoped_release released;
                 value = values::unpack_value(bytes);
               }
               return values::python_of(value);
             }),
             py::arg("bytes"));
}

}  // namespace trireme
