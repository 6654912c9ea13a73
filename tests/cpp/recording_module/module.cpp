// A communicator for Python tests that notes what goes over it (tests/python/harness/recording.py).

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <recording_communicator.h>

using namespace trireme::test;
namespace py = pybind11;

PYBIND11_MODULE(_recording, module) {
  py::module_::import("trireme._C");  // has the base class
  py::class_<WireRecord>(module, "WireRecord")
      .def_readonly("verb", &WireRecord::verb)
      .def_readonly("label", &WireRecord::label)
      .def_readonly("bytes", &WireRecord::bytes)
      .def_readonly("dtypes", &WireRecord::dtypes);

  py::class_<RecordingCommunicator, trireme::Communicator, std::shared_ptr<RecordingCommunicator>>(
      module, "RecordingCommunicator")
      .def(py::init<std::shared_ptr<trireme::Communicator>>(), py::arg("inner"))
      .def_property_readonly("records", &RecordingCommunicator::records)
      .def("clear", &RecordingCommunicator::clear);
}
