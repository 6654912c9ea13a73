#include <trireme/strategies/pipeline/elastic_plan.h>

#include <trireme/bindings/bindings.h>

#include <pybind11/operators.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using Numbers = std::vector<double>;
// A factor, or a cost per layer.
using FrozenCost = std::variant<double, Numbers>;

ElasticPlan make_plan(Numbers costs, int64_t frozen, int64_t ranks, std::optional<int64_t> first,
                      std::optional<int64_t> before, const FrozenCost& frozen_cost,
                      std::optional<std::vector<int64_t>> memory, std::optional<int64_t> limit,
                      bool keep_frozen_together) {
  ElasticPlanRequest request;
  request.costs = std::move(costs);
  request.frozen = frozen;
  request.ranks = ranks;
  request.first = first;
  request.before = before;
  if (const double* factor = std::get_if<double>(&frozen_cost)) request.frozen_factor = *factor;
  if (const Numbers* list = std::get_if<Numbers>(&frozen_cost)) request.frozen_costs = *list;
  request.memory = std::move(memory).value_or(std::vector<int64_t>());
  request.limit = limit;
  request.keep_frozen_together = keep_frozen_together;
  return elastic_plan(request);
}

}  // namespace

void init_elastic_plan(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<ElasticPlan>(module, "ElasticPlan")
      .def(py::init(
               [](int64_t ranks, int64_t replicas, std::vector<int64_t> balance, double seconds) {
                 return ElasticPlan{ranks, replicas, std::move(balance), seconds};
               }),
           py::kw_only(), py::arg("ranks_per_pipeline"), py::arg("replicas"), py::arg("balance"),
           py::arg("seconds") = 0.0)
      .def_readonly("ranks_per_pipeline", &ElasticPlan::ranks_per_pipeline)
      .def_readonly("replicas", &ElasticPlan::replicas)
      .def_readonly("balance", &ElasticPlan::balance)
      .def_readonly("seconds", &ElasticPlan::seconds)
      .def(py::self == py::self)  // NOLINT(misc-redundant-expression): that is how it is said
      .def("__hash__",
           [](const ElasticPlan& plan) { return std::hash<std::string>()(plan_text(plan)); })
      .def("__repr__",
           [](const ElasticPlan& plan) { return "ElasticPlan(" + plan_text(plan) + ")"; });
  module.def("elastic_plan", wrap_pybind_function(make_plan), py::arg("costs"), py::kw_only(),
             py::arg("frozen"), py::arg("ranks"), py::arg("first") = py::none(),
             py::arg("before") = py::none(), py::arg("frozen_cost") = 1.0 / 6,
             py::arg("memory") = py::none(), py::arg("limit") = py::none(),
             py::arg("keep_frozen_together") = false);
  module.def("layer_holders", wrap_pybind_function(&layer_holders), py::arg("plan"));
}

}  // namespace trireme
