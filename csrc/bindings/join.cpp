#include <trireme/bindings/bindings.h>
#include <trireme/sync/join_meeting.h>

#include <torch/csrc/Exceptions.h>

#include <array>
#include <memory>
#include <optional>

namespace trireme {

namespace py = pybind11;

void init_join(py::module_& module) {
  py::class_<JoinCall>(module, "JoinCall")
      .def(py::init([](int64_t what, std::array<double, 4> numbers) {
             return JoinCall{what, 0, numbers};
           }),
           py::arg("what"), py::arg("numbers") = std::array<double, 4>{})
      .def_readonly("what", &JoinCall::what)
      .def_readonly("numbers", &JoinCall::numbers);

  using torch::wrap_pybind_function_no_gil;
  py::class_<JoinMeeting>(module, "JoinMeeting")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("communicator"))
      .def("meet", wrap_pybind_function_no_gil(&JoinMeeting::meet), py::arg("own"))
      .def_property_readonly("calls", &JoinMeeting::calls)
      .def_property_readonly("call", &JoinMeeting::call)
      .def_property_readonly("any_has_run_out", &JoinMeeting::any_has_run_out)
      .def("text_of_root", wrap_pybind_function_no_gil(&JoinMeeting::text_of_root), py::arg("own"))
      .def("share_gradients", wrap_pybind_function_no_gil(&JoinMeeting::share_gradients),
           py::arg("parameters"));
}

}  // namespace trireme
