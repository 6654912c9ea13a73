#include <trireme/bindings/bindings.h>
#include <trireme/common/error.h>
#include <trireme/strategies/pipeline/partition.h>
#include <trireme/strategies/pipeline/schedule_check.h>
#include <trireme/strategies/pipeline/schedule_costs.h>
#include <trireme/strategies/pipeline/schedule_forms.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/schedule_text.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
// The times of F, I and W, each one for all stages or one per stage, and the time of a message.
using Costs = std::tuple<std::vector<double>, std::vector<double>, std::vector<double>, double>;

ScheduleCosts costs_of(const Costs& given) {
  const auto& [forward, input, weight, message] = given;
  const size_t stages = std::max({forward.size(), input.size(), weight.size()});
  const auto cost_of = [&](const std::vector<double>& costs, size_t stage) {
    TORCH_CHECK_VALUE(costs.size() == 1 || costs.size() == stages,
                      error_text("pipeline",
                                 "got costs for " + std::to_string(costs.size()) + " and for " +
                                     std::to_string(stages) + " stages",
                                 {}, "Give one number for all stages, or one for each."));
    return costs[costs.size() == 1 ? 0 : stage];
  };
  ScheduleCosts costs;
  costs.stages.clear();
  for (size_t stage = 0; stage < stages; ++stage) {
    costs.stages.push_back(
        {cost_of(forward, stage), cost_of(input, stage), cost_of(weight, stage)});
  }
  costs.message = message;
  return costs;
}

// Returns an action for Python, a bubble as None.
py::object to_cell(const PipelineAction& action) {
  if (action.kind == ActionKind::kBubble) return py::none();
  return py::cast(action);
}

py::list to_rows(const PipelineSchedule& schedule) {
  py::list rows;
  for (const RankActions& row : schedule.rows) {
    py::list cells;
    for (const PipelineAction& action : row) cells.append(to_cell(action));
    rows.append(cells);
  }
  return rows;
}

py::dict to_slots(const PipelineSchedule& schedule, int64_t slots) {
  py::dict found;
  for (const EdgeSlots& need : check_schedule(schedule, slots)) {
    found[py::make_tuple(need.edge.from, need.edge.to)] = need.slots;
  }
  return found;
}

py::list to_timeline(const PipelineSchedule& schedule, const Costs& costs) {
  py::list timed;
  for (const TimedAction& event : timeline(schedule, costs_of(costs))) {
    timed.append(py::make_tuple(event.rank, event.action, event.begin, event.end));
  }
  return timed;
}

PipelineSchedule make_schedule(std::string name, int64_t ranks, int64_t micro_batches,
                               std::optional<int64_t> stages_per_rank,
                               const std::optional<Costs>& costs,
                               std::optional<int64_t> max_activations) {
  PipelineScheduleRequest request;
  request.name = std::move(name);
  request.ranks = ranks;
  request.micro_batches = micro_batches;
  request.stages_per_rank = stages_per_rank;
  if (costs) request.costs = costs_of(*costs);
  request.max_activations = max_activations;
  return pipeline_schedule(request);
}

void init_action(py::module_& module) {
  py::class_<PipelineAction>(module, "PipelineAction")
      .def_property_readonly("stage",
                             [](const PipelineAction& action) -> std::optional<int32_t> {
                               if (action.stage < 0) return std::nullopt;
                               return action.stage;
                             })
      .def_property_readonly(
          "kind", [](const PipelineAction& action) { return std::string(kind_text(action.kind)); })
      .def_property_readonly("micro_batch",
                             [](const PipelineAction& action) -> std::optional<int32_t> {
                               if (action.micro_batch < 0) return std::nullopt;
                               return action.micro_batch;
                             })
      .def_property_readonly("sub_actions",
                             [](const PipelineAction& action) { return action.sub_actions; })
      .def("__eq__",
           [](const PipelineAction& action, const py::object& other) {
             return py::isinstance<PipelineAction>(other) && action == other.cast<PipelineAction>();
           })
      .def("__hash__",
           [](const PipelineAction& action) { return py::hash(py::str(to_string(action))); })
      .def("__repr__", [](const PipelineAction& action) { return to_string(action); });
}

}  // namespace

void init_pipeline(py::module_& module) {
  using torch::wrap_pybind_function;
  init_action(module);
  bind_channels(module);
  py::class_<PipelineSchedule>(module, "PipelineSchedule")
      .def_readonly("ranks", &PipelineSchedule::ranks)
      .def_readonly("stages", &PipelineSchedule::stages)
      .def_readonly("micro_batches", &PipelineSchedule::micro_batches)
      .def_readonly("stage_rank", &PipelineSchedule::stage_rank)
      .def_property_readonly("rows", to_rows)
      .def("__eq__",
           [](const PipelineSchedule& schedule, const py::object& other) {
             return py::isinstance<PipelineSchedule>(other) &&
                    schedule == other.cast<PipelineSchedule>();
           })
      .def("to_csv",
           wrap_pybind_function([](const PipelineSchedule& schedule, const std::string& form) {
             return to_csv(schedule, table_form(form));
           }),
           py::arg("form"))
      .def("table",
           [](const PipelineSchedule& schedule) { return to_csv(schedule, TableForm::kAsItIs); })
      .def("draw", wrap_pybind_function(
                       [](const PipelineSchedule& schedule) { return to_string(schedule); }))
      .def("check", wrap_pybind_function(to_slots), py::arg("slots"))
      .def("timeline", wrap_pybind_function(to_timeline), py::arg("costs"))
      .def("bubble", wrap_pybind_function([](const PipelineSchedule& schedule, const Costs& costs) {
             return bubble(schedule, costs_of(costs));
           }),
           py::arg("costs"))
      .def("makespan",
           wrap_pybind_function([](const PipelineSchedule& schedule, const Costs& costs) {
             return makespan(schedule, costs_of(costs));
           }),
           py::arg("costs"))
      .def(
          "with_recomputation",
          [](const PipelineSchedule& schedule, const std::string& which) {
            return with_recomputation(schedule, recomputation(which));
          },
          py::arg("checkpoint"))
      .def("peak_activations", wrap_pybind_function(peak_activations), py::arg("rank"))
      .def("peak_messages",
           wrap_pybind_function(
               [](const PipelineSchedule& schedule, int64_t from_stage, int64_t to_stage) {
                 return peak_messages(schedule, {from_stage, to_stage});
               }),
           py::arg("from_stage"), py::arg("to_stage"));
  module.def("make_pipeline_schedule", wrap_pybind_function(make_schedule), py::arg("name"),
             py::arg("ranks"), py::arg("micro_batches"), py::arg("stages_per_rank"),
             py::arg("costs"), py::arg("max_activations"));
  module.def("read_pipeline_schedule",
             wrap_pybind_function([](const std::string& csv) { return schedule_from_csv(csv); }),
             py::arg("csv"));
  module.def("partition",
             wrap_pybind_function([](std::vector<double> costs, int64_t parts,
                                     std::vector<int64_t> memory, std::optional<int64_t> limit) {
               return partition({std::move(costs), parts, std::move(memory), limit});
             }),
             py::arg("costs"), py::arg("parts"), py::arg("memory"), py::arg("limit"));
  init_elastic_plan(module);
}

}  // namespace trireme
