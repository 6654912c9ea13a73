#include <trireme/bindings/bindings.h>
#include <trireme/comm/launch/ranks.h>
#include <trireme/comm/launch/rendezvous.h>
#include <trireme/common/cpus.h>
#include <trireme/common/env.h>
#include <trireme/common/error.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

namespace trireme {

namespace py = pybind11;

namespace {

using Timeout = std::optional<std::chrono::milliseconds>;

std::optional<RankOf> caller(std::optional<int64_t> rank, std::optional<int64_t> world) {
  if (!rank || !world) return std::nullopt;
  return RankOf{*rank, *world};
}

void bind_environment(py::module_& module) {
  py::enum_<Launcher>(module, "Launcher")
      .value("ALONE", Launcher::kAlone)
      .value("VARIABLES", Launcher::kVariables)
      .value("OPEN_MPI", Launcher::kOpenMpi)
      .value("MPICH", Launcher::kMpich)
      .value("SLURM", Launcher::kSlurm)
      .value("CALLER", Launcher::kCaller);

  py::class_<LaunchEnvironment>(module, "LaunchEnvironment",
                                "The place of this process; see csrc/common/env.h.")
      .def_readonly("launcher", &LaunchEnvironment::launcher)
      .def_readonly("rank", &LaunchEnvironment::rank)
      .def_readonly("world", &LaunchEnvironment::world)
      .def_readonly("local_rank", &LaunchEnvironment::local_rank)
      .def_readonly("local_world", &LaunchEnvironment::local_world)
      .def_readonly("master_addr", &LaunchEnvironment::master_addr)
      .def_readonly("master_port", &LaunchEnvironment::master_port)
      .def_readonly("init_method", &LaunchEnvironment::init_method);

  // std::invalid_argument arrives as ValueError by pybind11's own translation.
  module.def(
      "read_launch_environment",
      [](std::optional<int64_t> rank, std::optional<int64_t> world) {
        return read_launch_environment(caller(rank, world));
      },
      py::arg("rank") = py::none(), py::arg("world") = py::none(),
      "Reads this process's place from the environment, or completes the given one.");
  module.def(
      "rank_seed",
      [](const py::int_& seed, int64_t rank) {
        return rank_seed(PyLong_AsUnsignedLongLongMask(seed.ptr()), rank);
      },
      py::arg("seed"), py::arg("rank"), "Returns what the random generator of a rank starts at.");
  module.def("threads_per_rank", &threads_per_rank, py::arg("environment"), py::arg("cpus"),
             "Threads this rank should compute with; None when OMP_NUM_THREADS says it.");
  module.def(
      "usable_cpus", [] { return usable_cpus(); },
      "CPUs that this process may keep busy, by affinity mask and control group.");
}

void bind_rendezvous(py::module_& module) {
  py::class_<Rendezvous>(module, "Rendezvous", "See csrc/comm/launch/rendezvous.h.")
      .def(py::init(torch::wrap_pybind_function_no_gil([](const LaunchEnvironment& environment,
                                                          const std::string& init_method,
                                                          Timeout timeout) {
             return std::make_unique<Rendezvous>(
                 RendezvousRequest{environment, init_method, timeout});
           })),
           py::arg("environment"), py::arg("init_method"), py::arg("timeout"))
      .def_property_readonly("store", &Rendezvous::store)
      .def("leave", &Rendezvous::leave, py::arg("patience"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void init_launch(py::module_& module) {
  module.def(
      "error_text",
      [](const std::string& area, const std::string& what, const std::string& next_step,
         int64_t rank, int64_t world) { return error_text(area, what, {rank, world}, next_step); },
      py::arg("area"), py::arg("what"), py::arg("next_step"), py::kw_only(), py::arg("rank") = -1,
      py::arg("world") = -1, "The one form of every message; without a world no rank is named.");
  bind_environment(module);
  bind_rendezvous(module);
}

}  // namespace trireme
