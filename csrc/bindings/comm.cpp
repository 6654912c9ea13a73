#include <trireme/bindings/bindings.h>
#include <trireme/comm/c10d_communicator.h>
#include <trireme/comm/recording_communicator.h>

#include <torch/csrc/Exceptions.h>

namespace trireme {

namespace py = pybind11;

void init_comm(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world", &Communicator::world)
      .def_property_readonly("failure", &Communicator::failure);

  py::class_<WireRecord>(module, "WireRecord")
      .def_readonly("verb", &WireRecord::verb)
      .def_readonly("label", &WireRecord::label)
      .def_readonly("bytes", &WireRecord::bytes)
      .def_readonly("dtypes", &WireRecord::dtypes);

  py::class_<RecordingCommunicator, Communicator, std::shared_ptr<RecordingCommunicator>>(
      module, "RecordingCommunicator")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("inner"))
      .def_property_readonly("records", &RecordingCommunicator::records)
      .def("clear", &RecordingCommunicator::clear);

  module.def("make_c10d_communicator", torch::wrap_pybind_function(make_c10d_communicator),
             py::arg("group"), py::arg("store"));
}

}  // namespace trireme
