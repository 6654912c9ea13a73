#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/common/intra_op_threads.h>
#include <trireme/common/worker_pool.h>
#include <trireme/strategies/data_parallel/core_groups.h>
#include <trireme/strategies/data_parallel/replica_pass.h>
#include <trireme/strategies/data_parallel/replicas.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

// Defers Ctrl-C while a Python thread waits for others: the exception is kept until they are back,
// and `on_interrupt` is called so that it can hurry them.
class InterruptedWait {
 public:
  explicit InterruptedWait(const py::function& on_interrupt) : on_interrupt_(on_interrupt) {}

  void look_around() {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return;
    interrupt_.emplace();  // takes over Python's present error
    on_interrupt_();
  }
  // Raises the error that Python has raised, if any; called with the GIL.
  void raise() {
    if (!interrupt_) return;
    interrupt_->restore();
    throw py::error_already_set();
  }

 private:
  const py::function& on_interrupt_;
  std::optional<py::error_already_set> interrupt_;
};

// Calls function(i) in the threads of `wait`: wait(job, while_waiting) returns when job(i) has
// returned in all of them. `function` and `on_interrupt` must not raise.
template <typename Wait>
void call_in_threads(const py::function& function, const py::function& on_interrupt,
                     const Wait& wait) {
  InterruptedWait interrupted(on_interrupt);
  {
    const py::gil_scoped_release no_gil;
    wait(
        [&](size_t i) {
          const py::gil_scoped_acquire gil;
          function(i);
        },
        [&] { interrupted.look_around(); });
  }
  interrupted.raise();
}

void run_pool(WorkerPool& pool, const std::vector<size_t>& workers, const py::function& function,
              const py::function& on_interrupt) {
  call_in_threads(function, on_interrupt, [&](const auto& job, const auto& while_waiting) {
    for (const std::exception_ptr& error : pool.run(workers, job, while_waiting))
      if (error) std::rethrow_exception(error);
  });
}

void forward(Replicas& replicas, ReplicaPass& pass, const py::function& function,
             const py::function& on_interrupt) {
  call_in_threads(function, on_interrupt, [&](const auto& job, const auto& while_waiting) {
    replicas.forward(pass, job, while_waiting);
  });
}

// Lets an exception that Python code raised in a backward reach the caller's thread unchanged, with
// the replica's name as a note if Python has notes (3.11).
void keep_python_error(const std::string& where, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    raised.persist();
    const py::gil_scoped_acquire gil;
    PyErr_Clear();  // set by the engine in this thread; `raised` holds it
    const py::handle value(raised.value);
    if (value && py::hasattr(value, "add_note"))
      value.attr("add_note")("[data_parallel] in the backward of " + where);
  } catch (c10::Error& raised) {
    raised.add_context("[data_parallel] in the backward of " + where);
  } catch (...) {
    // Other exceptions have no place for a context.
  }
}

std::shared_ptr<Replicas> make_replicas(ModuleReplicas module, std::shared_ptr<WorkerPool> pool,
                                        ReplicasOptions options) {
  auto replicas =
      std::make_shared<Replicas>(std::move(module), std::move(pool), std::move(options));
  replicas->on_error([&all = *replicas](size_t replica, const std::exception_ptr& error) {
    keep_python_error(all.describe(replica), error);
  });
  replicas->on_wait([]() -> std::exception_ptr {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return nullptr;
    python_error interrupt;
    interrupt.persist();
    return std::make_exception_ptr(interrupt);
  });
  return replicas;
}

py::dict to_dict(const ReplicasReport& report) {
  py::list replicas;
  for (const ReplicaReport& replica : report.replicas) {
    py::dict dict;
    dict["device"] = replica.device.str();
    dict["rows"] = replica.rows;
    dict["forward_ms"] = replica.forward_ms;
    dict["backward_ms"] = replica.backward_ms;
    dict["waiting_share"] = replica.waiting_share;
    dict["memory_bytes"] = replica.memory_bytes;
    replicas.append(dict);
  }
  py::dict dict;
  dict["step"] = report.step;
  dict["forward_ms"] = report.forward_ms;
  dict["backward_ms"] = report.backward_ms;
  dict["copied_bytes"] = report.copied_bytes;
  dict["replicas"] = replicas;
  return dict;
}

void init_pass(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  py::class_<ReplicaPass, std::shared_ptr<ReplicaPass>>(module, "ReplicaPass")
      .def_property_readonly("chunks",
                             [](const ReplicaPass& pass) {
                               std::vector<std::pair<size_t, int64_t>> chunks;
                               for (const Chunk& chunk : pass.chunks())
                                 chunks.emplace_back(chunk.replica, chunk.rows);
                               return chunks;
                             })
      .def("scatter", wrap_pybind_function_no_gil(&ReplicaPass::scatter), py::arg("input"),
           py::arg("dim"))
      .def("gather",
           wrap_pybind_function_no_gil([](ReplicaPass& pass, std::vector<Tensors> outputs,
                                          int64_t dim, std::vector<double> weights) {
             return pass.gather(std::move(outputs), {dim, std::move(weights)});
           }),
           py::arg("outputs"), py::arg("dim"), py::arg("weights"));
}

}  // namespace

void init_data_parallel(py::module_& module) {
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;
  py::class_<WorkerPool, std::shared_ptr<WorkerPool>>(module, "WorkerPool")
      .def(py::init<std::vector<c10::Device>, std::vector<int>>(), py::kw_only(),
           py::arg("devices"), py::arg("intra_op_threads"))
      .def(
          "worker_loop",
          [](WorkerPool& pool, size_t worker) {
            return py::cpp_function([worker_loop = pool.worker_loop(worker)] {
              const py::gil_scoped_release no_gil;
              worker_loop();
            });
          },
          py::arg("worker"))
      .def("stopper",
           [](WorkerPool& pool) {
             return py::cpp_function([stop = pool.stopper()] {
               const py::gil_scoped_release no_gil;
               stop();
             });
           })
      .def("run", wrap_pybind_function(run_pool), py::arg("workers"), py::arg("function"),
           py::arg("on_interrupt"));

  py::class_<ModuleReplicas>(module, "ModuleReplicas")
      .def(py::init([](std::vector<c10::Device> devices, std::vector<std::string> names,
                       Tensors parameters, std::vector<Tensors> leaves, Tensors buffers,
                       std::vector<Tensors> replica_buffers) {
             return ModuleReplicas{std::move(devices),    std::move(names),
                                   std::move(parameters), std::move(leaves),
                                   std::move(buffers),    std::move(replica_buffers)};
           }),
           py::kw_only(), py::arg("devices"), py::arg("names"), py::arg("parameters"),
           py::arg("leaves"), py::arg("buffers"), py::arg("replica_buffers"));

  py::class_<ReplicasOptions>(module, "ReplicasOptions")
      .def(py::init<>())
      .def_readwrite("weights", &ReplicasOptions::weights)
      .def_readwrite("auto_balance", &ReplicasOptions::auto_balance)
      .def_readwrite("copy_always", &ReplicasOptions::copy_always)
      .def_property(
          "output_device", [](const ReplicasOptions& options) { return options.output_device; },
          [](ReplicasOptions& options, c10::Device device) { options.output_device = device; });

  module.def(
      "default_replicas", [](int64_t threads) { return default_replicas(threads); },
      py::arg("threads"));
  module.def("intra_op_threads_of", &intra_op_threads_of, py::arg("threads"), py::arg("workers"));

  init_pass(module);
  py::class_<Replicas, std::shared_ptr<Replicas>>(module, "Replicas")
      .def(py::init(wrap_pybind_function_no_gil(make_replicas)), py::kw_only(), py::arg("module"),
           py::arg("pool"), py::arg("options"))
      .def("begin", wrap_pybind_function_no_gil(&Replicas::begin), py::arg("rows"))
      .def("forward", wrap_pybind_function(forward), py::arg("pass_"), py::arg("function"),
           py::arg("on_interrupt"))
      .def("describe", &Replicas::describe, py::arg("replica"))
      .def("last_step", [](const Replicas& replicas) { return to_dict(replicas.last_step()); });
}

}  // namespace trireme
