#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/bindings/step_report.h>
#include <trireme/strategies/zero/consolidated_state.h>
#include <trireme/strategies/zero/zero_cores.h>

#include <torch/csrc/Exceptions.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

NamedParameters named(std::vector<std::string> names, std::vector<at::Tensor> parameters) {
  std::vector<bool> sparse(parameters.size(), false);
  return {std::move(names), std::move(parameters), std::move(sparse)};
}

// Returns a callback that takes the GIL.
std::function<void()> callback_of(py::function function) {
  return [shared = shared_function(std::move(function))] {
    const py::gil_scoped_acquire gil;
    (*shared)();
  };
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
      .def_readwrite("fused_step", &ZeroOptions::fused_step)
      .def_readwrite("compression", &ZeroOptions::compression);

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
      .def("parameters", &Zero::parameters)
      .def("shards", &Zero::shards)
      .def("plan", &plan_of)
      .def("sharded_parameters",
           [](const Zero& zero) { return sharded_parameters(zero.parameter_infos(), zero.plan()); })
      .def_property_readonly("shares_parameters", &Zero::shares_parameters)
      .def("abandon_step", &Zero::abandon_step, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def("begin_writing", wrap_pybind_function_no_gil(&Zero::begin_writing))
      .def("end_writing", wrap_pybind_function_no_gil(&Zero::end_writing))
      .def_property_readonly("is_writing", &Zero::is_writing)
      .def("give_own_memory", wrap_pybind_function_no_gil(&Zero::give_own_memory),
           py::arg("parameters"))
      .def("begin_writing_shards", wrap_pybind_function_no_gil(&Zero::begin_writing_shards))
      .def("end_writing_shards", wrap_pybind_function_no_gil(&Zero::end_writing_shards))
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
      .def("last_step", [](Zero& zero) {
        StepReport report;
        {
          const py::gil_scoped_release no_gil;
          report = zero.reducer()->last_step();
        }
        return to_dict(report);
      });

  py::class_<ZeroCores, std::shared_ptr<ZeroCores>>(module, "ZeroCores")
      .def(py::init([](std::shared_ptr<Communicator> communicator, const ZeroOptions& options,
                       py::function retired) {
             return std::make_shared<ZeroCores>(std::move(communicator), options,
                                                callback_of(std::move(retired)));
           }),
           py::kw_only(), py::arg("communicator"), py::arg("options"), py::arg("retired"))
      .def_static("of", &ZeroCores::of, py::arg("parameter"))
      .def("claim",
           wrap_pybind_function_no_gil([](ZeroCores& cores, std::vector<std::string> names,
                                          std::vector<at::Tensor> parameters) {
             cores.claim(named(std::move(names), std::move(parameters)));
           }),
           py::arg("names"), py::arg("parameters"))
      .def("shard",
           wrap_pybind_function_no_gil([](ZeroCores& cores, std::vector<std::string> names,
                                          std::vector<at::Tensor> parameters) {
             cores.shard(named(std::move(names), std::move(parameters)));
           }),
           py::arg("names"), py::arg("parameters"))
      .def("commit", wrap_pybind_function_no_gil(&ZeroCores::commit))
      .def("undo", wrap_pybind_function_no_gil(&ZeroCores::undo))
      .def("live", torch::wrap_pybind_function(&ZeroCores::live))
      .def("kept_codes", &ZeroCores::kept_codes)
      .def("begin_step",
           wrap_pybind_function_no_gil(
               [](ZeroCores& cores, bool found_inf, std::optional<uint32_t> scaler_writes) {
                 return cores.begin_step({found_inf, scaler_writes});
               }),
           py::arg("found_inf"), py::arg("scaler_writes"))
      .def("end_step", wrap_pybind_function_no_gil(&ZeroCores::end_step))
      .def("zero_grad", wrap_pybind_function_no_gil(&ZeroCores::zero_grad), py::arg("set_to_none"))
      .def("set_synchronize", wrap_pybind_function_no_gil(&ZeroCores::set_synchronize),
           py::arg("synchronize"))
      .def("set_divisor", wrap_pybind_function_no_gil(&ZeroCores::set_divisor), py::arg("divisor"))
      .def(
          "set_armed_callback",
          [](ZeroCores& cores, py::function callback) {
            const auto armed = callback_of(std::move(callback));
            const py::gil_scoped_release no_gil;
            cores.set_armed_callback(armed);
          },
          py::arg("callback"))
      .def("shadow_backward", wrap_pybind_function_no_gil(&ZeroCores::shadow_backward));
}

}  // namespace trireme
