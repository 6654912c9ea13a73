#include <trireme/bindings/bindings.h>
#include <trireme/pipetransformer/freeze_course.h>
#include <trireme/pipetransformer/freeze_rule.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using Choose = std::function<int64_t(const FreezePoint&)>;

}  // namespace

void init_pipetransformer(py::module_& module) {
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;
  module.def("freeze_schedule", wrap_pybind_function(&freeze_schedule), py::arg("layers"),
             py::arg("alpha"), py::arg("epochs"));
  py::class_<FreezePoint>(module, "FreezePoint")
      .def(
          py::init([](int64_t layers, int64_t frozen, int64_t interval, std::vector<double> norms) {
            return FreezePoint{layers, frozen, interval, std::move(norms)};
          }),
          py::kw_only(), py::arg("layers"), py::arg("frozen"), py::arg("interval"),
          py::arg("norms"))
      .def_readonly("layers", &FreezePoint::layers)
      .def_readonly("frozen", &FreezePoint::frozen)
      .def_readonly("interval", &FreezePoint::interval)
      .def_readonly("norms", &FreezePoint::norms);
  module.def("frozen_by_gradient", wrap_pybind_function(&frozen_by_gradient), py::arg("point"),
             py::arg("alpha"));
  py::class_<FreezeCourse>(module, "FreezeCourse")
      .def(py::init([](std::vector<std::string> layers, double alpha, std::string rule,
                       Choose choose, int64_t measure_every, int64_t hold, bool eval_frozen,
                       std::shared_ptr<Communicator> ranks) {
             FreezeOptions options{alpha, std::move(rule), std::move(choose), measure_every,
                                   hold,  eval_frozen};
             const py::gil_scoped_release no_gil;
             return std::make_unique<FreezeCourse>(std::move(layers), std::move(options),
                                                   std::move(ranks));
           }),
           py::kw_only(), py::arg("layers"), py::arg("alpha"), py::arg("rule"), py::arg("choose"),
           py::arg("measure_every"), py::arg("hold"), py::arg("eval_frozen"), py::arg("ranks"))
      .def("begin_step", &FreezeCourse::begin_step)
      .def("measure", wrap_pybind_function_no_gil(&FreezeCourse::measure), py::arg("parts"))
      .def("advance", wrap_pybind_function_no_gil(&FreezeCourse::advance), py::arg("keeps_last"))
      .def("unfreeze", wrap_pybind_function(&FreezeCourse::unfreeze), py::arg("stay"))
      .def("load",
           wrap_pybind_function([](FreezeCourse& course, std::vector<std::string> layers,
                                   int64_t frozen, std::vector<int64_t> history) {
             course.load({std::move(layers), frozen, std::move(history)});
           }),
           py::arg("layers"), py::arg("frozen"), py::arg("history"))
      .def_property_readonly("frozen", &FreezeCourse::frozen)
      .def_property_readonly("history", &FreezeCourse::history);
}

}  // namespace trireme
