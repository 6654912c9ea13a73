#include <trireme/comm/named_order.h>

#include <trireme/bindings/bindings.h>

#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

namespace py = pybind11;

using torch::wrap_pybind_function_no_gil;

void init_named_order(py::module_& module) {
  py::class_<NamedOperation>(module, "NamedOperation")
      .def(py::init([](std::string name, int64_t set, std::string kind,
                       std::vector<std::pair<std::string, std::string>> terms, std::string payload,
                       bool can_have_zeros) {
             return NamedOperation{std::move(name),    set,
                                   std::move(kind),    std::move(terms),
                                   std::move(payload), can_have_zeros};
           }),
           py::arg("name"), py::arg("set"), py::arg("kind"), py::arg("terms"), py::arg("payload"),
           py::arg("can_have_zeros"));

  py::class_<AgreedOperation>(module, "AgreedOperation")
      .def_property_readonly("name",
                             [](const AgreedOperation& self) { return self.operation.name; })
      .def_property_readonly("set", [](const AgreedOperation& self) { return self.operation.set; })
      .def_property_readonly("kind",
                             [](const AgreedOperation& self) { return self.operation.kind; })
      .def_property_readonly("terms",
                             [](const AgreedOperation& self) { return self.operation.terms; })
      .def_property_readonly("payload",
                             [](const AgreedOperation& self) { return self.operation.payload; })
      .def_readonly("payloads", &AgreedOperation::payloads)
      .def_readonly("error", &AgreedOperation::error)
      .def_readonly("last_joined", &AgreedOperation::last_joined);

  py::class_<NamedOrder, std::shared_ptr<NamedOrder>>(module, "NamedOrder")
      .def(py::init([](const std::shared_ptr<Communicator>& communicator,
                       std::chrono::milliseconds report_after,
                       std::chrono::milliseconds fail_after) {
             const py::gil_scoped_release released;
             return std::make_shared<NamedOrder>(communicator,
                                                 NamedOrderOptions{report_after, fail_after});
           }),
           py::arg("communicator"), py::arg("report_after"), py::arg("fail_after"))
      .def("announce", wrap_pybind_function_no_gil(&NamedOrder::announce), py::arg("operation"))
      .def("define_set", &NamedOrder::define_set, py::arg("set"), py::arg("ranks"),
           py::call_guard<py::gil_scoped_release>())
      .def("wait_for_next", wrap_pybind_function_no_gil(&NamedOrder::wait_for_next))
      .def("take_report", &NamedOrder::take_report, py::call_guard<py::gil_scoped_release>())
      .def("next", wrap_pybind_function_no_gil(&NamedOrder::next))
      .def("begin_turn", &NamedOrder::begin_turn, py::call_guard<py::gil_scoped_release>())
      .def("next_in_turn", wrap_pybind_function_no_gil(&NamedOrder::next_in_turn))
      .def("end_turn", wrap_pybind_function_no_gil(&NamedOrder::end_turn))
      .def("close", &NamedOrder::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace trireme
