#include <trireme/strategies/zero/zero.h>

#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/bindings/step_report.h>
#include <trireme/strategies/zero/consolidated_state.h>

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <utility>

namespace trireme {
namespace {

namespace py = pybind11;

std::shared_ptr<Zero> make_zero(std::vector<std::string> names, std::vector<at::Tensor> parameters,
                                std::shared_ptr<Communicator> communicator,
                                const ZeroOptions& options) {
  std::vector<bool> sparse(parameters.size(), false);
  NamedParameters named{std::move(names), std::move(parameters), std::move(sparse)};
  return std::make_shared<Zero>(std::move(named), std::move(communicator), options);
}

// Returns, for each parameter, the elements [begin, begin + numel) of each rank.
std::vector<std::vector<std::pair<int64_t, int64_t>>> plan_of(const Zero& zero) {
  std::vector<std::vector<std::pair<int64_t, int64_t>>> plan;
  for (const std::vector<ShardRange>& ranks : zero.plan().shards) {
    plan.emplace_back();
    for (const ShardRange& range : ranks) plan.back().emplace_back(range.begin, range.numel);
  }
  return plan;
}

}  // namespace

void init_zero(py::module_& module) {
  py::enum_<ShardPlacement>(module, "ShardPlacement")
      .value("DIM0", ShardPlacement::kDim0)
      .value("FLAT", ShardPlacement::kFlat)
      .value("WHOLE", ShardPlacement::kWhole);

  py::class_<ZeroOptions>(module, "ZeroOptions")
      .def(py::init<>())
      .def_readwrite("stage", &ZeroOptions::stage)
      .def_readwrite("host_params", &ZeroOptions::host_params)
      .def_readwrite("placement", &ZeroOptions::placement)
      .def_readwrite("fused_step", &ZeroOptions::fused_step);

  py::class_<FusedAdamGroup>(module, "FusedAdamGroup")
      .def(py::init<>())
      .def_readwrite("parameters", &FusedAdamGroup::parameters)
      .def_readwrite("exp_avgs", &FusedAdamGroup::exp_avgs)
      .def_readwrite("exp_avg_sqs", &FusedAdamGroup::exp_avg_sqs)
      .def_readwrite("max_exp_avg_sqs", &FusedAdamGroup::max_exp_avg_sqs)
      .def_readwrite("steps", &FusedAdamGroup::steps)
      .def_readwrite("options", &FusedAdamGroup::options);

  using torch::wrap_pybind_function_no_gil;
  py::class_<Zero, std::shared_ptr<Zero>>(module, "Zero")
      .def(py::init(wrap_pybind_function_no_gil(make_zero)), py::kw_only(), py::arg("names"),
           py::arg("parameters"), py::arg("communicator"), py::arg("options"))
      .def("shards", &Zero::shards)
      .def("plan", &plan_of)
      .def("sharded_parameters",
           [](const Zero& zero) { return sharded_parameters(zero.parameter_infos(), zero.plan()); })
      .def_property_readonly("shares_parameters", &Zero::shares_parameters)
      .def("begin_step",
           wrap_pybind_function_no_gil(
               [](Zero& zero, bool found_inf, std::optional<uint32_t> scaler_writes) {
                 return zero.begin_step({found_inf, scaler_writes});
               }),
           py::arg("found_inf"), py::arg("scaler_writes"))
      .def("end_step", wrap_pybind_function_no_gil(&Zero::end_step))
      .def("abandon_step", &Zero::abandon_step, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def("begin_writing", wrap_pybind_function_no_gil(&Zero::begin_writing))
      .def("end_writing", wrap_pybind_function_no_gil(&Zero::end_writing))
      .def_property_readonly("is_writing", &Zero::is_writing)
      .def("give_own_memory", wrap_pybind_function_no_gil(&Zero::give_own_memory),
           py::arg("parameters"))
      .def("retire", wrap_pybind_function_no_gil(&Zero::retire))
      .def("begin_writing_shards", wrap_pybind_function_no_gil(&Zero::begin_writing_shards))
      .def("end_writing_shards", wrap_pybind_function_no_gil(&Zero::end_writing_shards))
      .def("set_synchronize", wrap_pybind_function_no_gil(&Zero::set_synchronize),
           py::arg("synchronize"))
      .def(
          "set_divisor", [](Zero& zero, double divisor) { zero.reducer()->set_divisor(divisor); },
          py::arg("divisor"))
      .def(
          "set_armed_callback",
          [](Zero& zero, py::function callback) {
            const auto shared = shared_function(std::move(callback));
            const py::gil_scoped_release no_gil;
            zero.trigger()->set_armed_callback([shared] {
              const py::gil_scoped_acquire gil;
              (*shared)();
            });
          },
          py::arg("callback"))
      .def_static(
          "arm_together",
          [](const std::vector<std::shared_ptr<Zero>>& zeros) {
            std::vector<std::shared_ptr<BackwardTrigger>> armings;
            for (const auto& zero : zeros) armings.push_back(zero->trigger());
            BackwardTrigger::arm_together(armings);
          },
          py::arg("zeros"))
      .def("shadow_backward",
           wrap_pybind_function_no_gil([](Zero& zero) { zero.reducer()->shadow_backward(); }))
      .def("summed",
           [](const Zero& zero) { return zero.has_sums() ? zero.summed() : std::vector<bool>(); })
      .def("fused_adam_step", wrap_pybind_function_no_gil(&Zero::fused_adam_step),
           py::arg("groups"))
      .def(
          "own_gradients",
          wrap_pybind_function_no_gil([](const Zero& zero, const std::vector<int64_t>& parameters) {
            return zero.gradients(parameters).gradients;
          }),
          py::arg("parameters"))
      .def("zero_grad", wrap_pybind_function_no_gil(&Zero::zero_grad), py::arg("set_to_none"))
      .def("last_step", [](Zero& zero) {
        StepReport report;
        {
          const py::gil_scoped_release no_gil;
          report = zero.reducer()->last_step();
        }
        return to_dict(report);
      });
}

}  // namespace trireme
