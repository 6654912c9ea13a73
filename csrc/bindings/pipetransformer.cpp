#include <trireme/bindings/bindings.h>
#include <trireme/pipetransformer/elastic_course.h>
#include <trireme/pipetransformer/freeze_course.h>
#include <trireme/pipetransformer/freeze_rule.h>
#include <trireme/pipetransformer/layer_memory.h>
#include <trireme/pipetransformer/move_layers.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using Choose = std::function<int64_t(const FreezePoint&)>;
using torch::wrap_pybind_function;
using torch::wrap_pybind_function_no_gil;

void bind_moves(py::module_& module) {
  py::class_<LayerMove>(module, "LayerMove")
      .def(py::init([](std::string name, std::vector<int64_t> before, std::vector<int64_t> after,
                       NamedTensors tensors, NamedTensors state, std::string values) {
             return LayerMove{std::move(name),    std::move(before), std::move(after),
                              std::move(tensors), std::move(state),  std::move(values)};
           }),
           py::kw_only(), py::arg("name"), py::arg("before"), py::arg("after"), py::arg("tensors"),
           py::arg("state") = NamedTensors(), py::arg("values") = "");
  py::class_<MovedState>(module, "MovedState")
      .def_readonly("state", &MovedState::state)
      .def_readonly("values", &MovedState::values);
  module.def(
      "move_layers",
      wrap_pybind_function_no_gil([](const std::vector<LayerMove>& moves, const std::string& plan,
                                     const std::shared_ptr<Communicator>& ranks) {
        return move_layers(moves, plan, ranks.get());
      }),
      py::arg("moves"), py::kw_only(), py::arg("plan"), py::arg("ranks"));
  module.def(
      "free_memory",
      wrap_pybind_function([](const std::vector<at::Tensor>& tensors, const std::string& text) {
        for (const at::Tensor& tensor : tensors) free_memory(tensor, text);
      }),
      py::arg("tensors"), py::arg("text"));
  module.def("has_memory", wrap_pybind_function(&has_memory), py::arg("tensor"));
}

void bind_elastic_epoch(py::module_& module) {
  py::class_<ElasticEpoch>(module, "ElasticEpoch")
      .def_readonly("epoch", &ElasticEpoch::epoch)
      .def_readonly("frozen", &ElasticEpoch::frozen)
      .def_readonly("ranks_per_pipeline", &ElasticEpoch::ranks_per_pipeline)
      .def_readonly("replicas", &ElasticEpoch::replicas)
      .def_readonly("seconds", &ElasticEpoch::seconds)
      .def_readonly("hits", &ElasticEpoch::hits);
}

// A property that may throw an error of torch.
template <typename Getter>
auto read(Getter getter) {
  return wrap_pybind_function(getter);
}

py::tuple to_tuple(IndexRange range) { return py::make_tuple(range.begin, range.end); }

void bind_elastic_course(py::module_& module) {
  bind_elastic_epoch(module);
  py::class_<ElasticCourse>(module, "ElasticCourse")
      .def(py::init([](std::vector<std::string> layers, int64_t global_batch, int64_t chunks,
                       bool pipe, bool replicas, bool cached,
                       std::optional<std::vector<double>> costs,
                       std::shared_ptr<Communicator> ranks) {
             ElasticOptions options{std::move(layers),
                                    global_batch,
                                    chunks,
                                    pipe,
                                    replicas,
                                    cached,
                                    std::move(costs).value_or(std::vector<double>())};
             const py::gil_scoped_release no_gil;
             return std::make_unique<ElasticCourse>(std::move(options), std::move(ranks));
           }),
           py::kw_only(), py::arg("layers"), py::arg("global_batch"), py::arg("chunks"),
           py::arg("pipe"), py::arg("replicas"), py::arg("cached"), py::arg("costs"),
           py::arg("ranks"))
      .def_property_readonly("needs_costs", &ElasticCourse::needs_costs)
      .def("take_costs", wrap_pybind_function_no_gil(&ElasticCourse::take_costs),
           py::arg("forward"), py::arg("backward"))
      .def("next_plan", wrap_pybind_function(&ElasticCourse::next_plan), py::arg("frozen"))
      .def("check_plan", wrap_pybind_function(&ElasticCourse::check_plan), py::arg("plan"))
      .def("adopt", wrap_pybind_function(&ElasticCourse::adopt), py::arg("plan"), py::arg("frozen"))
      .def_property_readonly("plan",
                             read([](const ElasticCourse& course) { return course.plan(); }))
      .def_property_readonly("where",
                             read([](const ElasticCourse& course) { return course.where(); }))
      .def_property_readonly(
          "rows", read([](const ElasticCourse& course) { return to_tuple(course.rows()); }))
      .def_property_readonly(
          "micro_batches", read([](const ElasticCourse& course) { return course.micro_batches(); }))
      .def_property_readonly("own_layers", read([](const ElasticCourse& course) {
                               return to_tuple(course.own_layers());
                             }))
      .def("check_batch",
           wrap_pybind_function_no_gil(
               [](const ElasticCourse& course, int64_t rows, const std::optional<at::Tensor>& ids) {
                 course.check_batch(rows, ids.value_or(at::Tensor()));
               }),
           py::arg("rows"), py::arg("ids"))
      .def("mean_loss", wrap_pybind_function_no_gil(&ElasticCourse::mean_loss), py::arg("loss"))
      .def("end_epoch",
           wrap_pybind_function_no_gil(
               [](ElasticCourse& course, int64_t frozen, double seconds, int64_t hits) {
                 return course.end_epoch(frozen, seconds, hits);
               }),
           py::arg("frozen"), py::arg("seconds"), py::arg("hits"))
      .def_property_readonly("history", &ElasticCourse::history);
}

}  // namespace

void init_pipetransformer(py::module_& module) {
  bind_moves(module);
  bind_elastic_course(module);
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
