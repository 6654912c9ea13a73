// The sim device for Python tests (tests/python/device/sim_device.py); see [Note: a device of
// threads] in device/sim_stream.h.

#include <trireme/activation/checkpoint.h>

#include <torch/csrc/utils/pybind.h>

#include <device/sim_device.h>
#include <device/sim_engine.h>
#include <device/sim_stream.h>

using namespace trireme::test;
namespace py = pybind11;

PYBIND11_MODULE(_sim_device, module) {
  module.def("make_engine",
             [](const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t world,
                const py::object& /*timeout*/) { return make_sim_engine(store, {rank, world}); });
  // A checkpoint of C++ in a process with Python.
  module.def("checkpointed_waves", [](const at::Tensor& x) {
    return trireme::checkpoint([](const at::Tensor& v) { return v.sin().exp().cos(); }, x);
  });
  module.def("device_count", [] { return static_cast<int64_t>(kSimDevices); });
  module.def("current_device", [] {
    return static_cast<int64_t>(c10::impl::VirtualGuardImpl(kSim).getDevice().index());
  });
  module.def("set_device", [](int64_t number) { use_sim_device(sim_device(number)); });
  module.def(
      "synchronize", [](int64_t number) { synchronize(sim_device(number)); },
      py::call_guard<py::gil_scoped_release>());
}
