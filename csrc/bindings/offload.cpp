#include <trireme/bindings/bindings.h>
#include <trireme/strategies/fsdp/offload_plan.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <tuple>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// Returns the parameters offloaded for the optimizer only, those offloaded entirely, and the bytes
// owed afterwards (OffloadOwed).
auto plan_offload(const std::vector<int64_t>& parameter_bytes, double optimizer, double params,
                  std::pair<double, double> owed) {
  const OffloadPlan plan =
      make_offload_plan({optimizer, params, parameter_bytes, {owed.first, owed.second}});
  std::vector<size_t> optimizers, all;
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    if (plan.parameters[i] == ShardOffload::kOptimizer) optimizers.push_back(i);
    if (plan.parameters[i] == ShardOffload::kAll) all.push_back(i);
  }
  return std::tuple(optimizers, all, std::pair(plan.owed.optimizer, plan.owed.params));
}

}  // namespace

void init_offload(py::module_& module) {
  module.def("plan_offload", torch::wrap_pybind_function(plan_offload), py::arg("parameter_bytes"),
             py::kw_only(), py::arg("optimizer"), py::arg("params"), py::arg("owed"),
             "See csrc/strategies/fsdp/offload_plan.h.");
}

}  // namespace trireme
