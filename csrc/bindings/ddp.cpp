#include <trireme/strategies/ddp/ddp.h>

#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/bindings/step_report.h>
#include <trireme/comm/c10d/comm_hook.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

py::list to_list(const BucketPlan& plan, const std::vector<ParameterInfo>& infos) {
  py::list buckets;
  for (const PlannedBucket& bucket : plan.buckets) {
    py::list names;
    for (const BucketSlot& slot : bucket.slots)
      names.append(infos[static_cast<size_t>(slot.parameter)].name);
    buckets.append(names);
  }
  return buckets;
}

std::shared_ptr<Ddp> make_ddp(std::vector<std::string> names, std::vector<at::Tensor> parameters,
                              std::vector<bool> sparse, std::vector<at::Tensor> buffers,
                              std::shared_ptr<Communicator> communicator,
                              const DdpOptions& options) {
  ModuleTensors tensors{{std::move(names), std::move(parameters), std::move(sparse)},
                        std::move(buffers)};
  return std::make_shared<Ddp>(std::move(tensors), std::move(communicator), options);
}

// torch's PythonCommHook must be destroyed under the GIL, and a reducer may die on any thread.
std::shared_ptr<c10d::CommHookInterface> python_hook(py::object state, py::object hook) {
  return {new c10d::PythonCommHook(std::move(state), std::move(hook)),
          [](c10d::PythonCommHook* python) {
            const py::gil_scoped_acquire gil;
            delete python;
          }};
}

void watch_module(Ddp& ddp, py::function look, py::function adopted) {
  const auto shared_look = shared_function(std::move(look));
  const auto shared_adopted = shared_function(std::move(adopted));
  ModuleWatch watch;
  watch.look = [shared_look](bool thoroughly) -> std::optional<ModuleNow> {
    const py::gil_scoped_acquire gil;
    const py::object found = (*shared_look)(thoroughly);
    if (found.is_none()) return std::nullopt;
    return found.cast<ModuleNow>();
  };
  watch.adopted = [shared_adopted] {
    const py::gil_scoped_acquire gil;
    (*shared_adopted)();
  };
  const py::gil_scoped_release no_gil;
  ddp.reducer().watch_module(std::move(watch));
}

}  // namespace

void init_ddp(py::module_& module) {
  py::class_<DdpOptions>(module, "DdpOptions")
      .def(py::init<>())
      .def_readwrite("init_sync", &DdpOptions::init_sync)
      .def_readwrite("init_sync_buffers", &DdpOptions::init_sync_buffers)
      .def_readwrite("bucket_cap_mb", &DdpOptions::bucket_cap_mb)
      .def_readwrite("bucket_cap_mb_list", &DdpOptions::bucket_cap_mb_list)
      .def_readwrite("gradient_as_bucket_view", &DdpOptions::gradient_as_bucket_view)
      .def_readwrite("compression", &DdpOptions::compression)
      .def_property(
          "reduce_dtype", [](const DdpOptions& options) { return options.reduce_dtype; },
          [](DdpOptions& options, std::optional<at::ScalarType> dtype) {
            options.reduce_dtype = dtype;
          });

  py::class_<ModuleNow>(module, "ModuleNow")
      .def(py::init([](std::vector<std::string> names, std::vector<at::Tensor> parameters,
                       std::vector<bool> sparse_gradient, std::vector<std::string> beside) {
             return ModuleNow{{std::move(names), std::move(parameters), std::move(sparse_gradient)},
                              std::move(beside)};
           }),
           py::kw_only(), py::arg("names"), py::arg("parameters"), py::arg("sparse_gradient"),
           py::arg("beside"));

  using torch::wrap_pybind_function_no_gil;
  py::class_<Ddp, std::shared_ptr<Ddp>>(module, "Ddp")
      .def(py::init(wrap_pybind_function_no_gil(make_ddp)), py::kw_only(), py::arg("names"),
           py::arg("parameters"), py::arg("sparse_gradient"), py::arg("buffers"),
           py::arg("communicator"), py::arg("options"))
      .def("before_forward", wrap_pybind_function_no_gil(&Ddp::before_forward))
      .def("after_forward", wrap_pybind_function_no_gil(&Ddp::after_forward), py::arg("outputs"),
           py::arg("synchronize"), py::arg("all_found"))
      .def("sync_buffers", wrap_pybind_function_no_gil(&Ddp::sync_buffers), py::arg("buffers"),
           py::arg("root"))
      .def("sync_module", wrap_pybind_function_no_gil(&Ddp::sync_module), py::arg("buffers"),
           py::arg("root"))
      .def("is_held", &Ddp::is_held)
      .def("has_averaged", wrap_pybind_function_no_gil(&Ddp::has_averaged))
      .def("prepare_for_backward",
           wrap_pybind_function_no_gil([](Ddp& ddp) { ddp.trigger().prepare_for_backward(); }))
      .def("shadow_backward", wrap_pybind_function_no_gil([](Ddp& ddp, bool deliver) {
             ddp.reducer().shadow_backward(deliver);
           }),
           py::arg("deliver"))
      .def("finalize_backward",
           wrap_pybind_function_no_gil([](Ddp& ddp) { ddp.reducer().finalize_backward(); }))
      .def("should_finalize_after_backward", [](Ddp& ddp) { return ddp.trigger().is_manual(); })
      .def("set_manual_finalization", wrap_pybind_function_no_gil([](Ddp& ddp, bool manual) {
             ddp.reducer().set_manual_finalization(manual);
           }),
           py::arg("manual"))
      .def("set_delivered_callback",
           torch::wrap_pybind_function([](Ddp& ddp, py::function callback) {
             const auto shared = shared_function(std::move(callback));
             const py::gil_scoped_release no_gil;
             ddp.reducer().set_delivered_callback([shared](const std::vector<int64_t>& parameters) {
               const py::gil_scoped_acquire gil;
               (*shared)(parameters);
             });
           }),
           py::arg("callback"))
      .def(
          "set_divisor", [](Ddp& ddp, double divisor) { ddp.reducer().set_divisor(divisor); },
          py::arg("divisor"))
      .def("register_comm_hook",
           torch::wrap_pybind_function([](Ddp& ddp, py::object state, py::object hook) {
             auto adapted =
                 make_comm_hook(python_hook(std::move(state), std::move(hook)), ddp.communicator());
             const py::gil_scoped_release no_gil;
             ddp.set_comm_hook(std::move(adapted));
           }),
           py::arg("state"), py::arg("hook"))
      .def("last_step",
           [](Ddp& ddp) {
             StepReport report;
             {
               const py::gil_scoped_release no_gil;
               report = ddp.reducer().last_step();
             }
             return to_dict(report);
           })
      .def("kept_codes", &Ddp::kept_codes)
      .def("watch_module", watch_module, py::arg("look"), py::arg("adopted"))
      .def("describe_plan",
           [](Ddp& ddp) {
             const BucketLayout& layout = ddp.reducer().layout();
             return to_string(layout.plan(), layout.infos());
           })
      .def("plan", [](Ddp& ddp) {
        const BucketLayout& layout = ddp.reducer().layout();
        return to_list(layout.plan(), layout.infos());
      });
}

}  // namespace trireme
