#include <trireme/strategies/parameter_server/parameter_server.h>

#include <trireme/bindings/bindings.h>
#include <trireme/strategies/parameter_server/embedding.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;
using torch::wrap_pybind_function_no_gil;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

ps::NamedTensors named(const std::vector<std::string>& names, const Tensors& tensors) {
  ps::NamedTensors all;
  for (size_t i = 0; i < names.size(); ++i) all.insert(names[i], tensors[i]);
  return all;
}

ps::TableSpec make_table_spec(std::string name,
                              const std::pair<std::vector<std::string>, Tensors>& tensors,
                              bool is_module, OptimizerSpec optimizer,
                              const std::tuple<bool, std::optional<int64_t>>& options,
                              std::vector<std::pair<std::string, at::Tensor>> buffers) {
  const auto [divides, staleness] = options;
  ps::TableSpec table{
      std::move(name),      tensors.first,
      tensors.second,       is_module,
      std::move(optimizer), {divides ? ps::Reduction::kMean : ps::Reduction::kSum, staleness}};
  table.buffers = std::move(buffers);
  return table;
}

ps::TableSpec make_sparse_spec(std::string name, int64_t dim, OptimizerSpec optimizer,
                               ps::SparseOptions options) {
  return ps::sparse(std::move(name), dim, std::move(optimizer), options);
}

ps::SparseOptions make_sparse_options(ps::RowInit init, uint64_t seed, at::ScalarType dtype,
                                      std::optional<int64_t> rows,
                                      const std::tuple<bool, std::optional<int64_t>>& options) {
  const auto [divides, staleness] = options;
  return {init, seed, dtype, rows, divides ? ps::Reduction::kMean : ps::Reduction::kSum, staleness};
}

py::dict dict_of(const ps::Stats& stats) {
  py::dict dict;
  dict["clocks"] = stats.clocks;
  dict["slowest"] = stats.slowest;
  dict["left"] = stats.left;
  dict["lost"] = stats.lost;
  dict["waited_s"] = stats.waited;
  dict["pulls"] = stats.pulls;
  dict["pushes"] = stats.pushes;
  dict["dropped"] = stats.dropped;
  dict["bytes_pulled"] = stats.bytes_pulled;
  dict["bytes_pushed"] = stats.bytes_pushed;
  dict["torn"] = stats.torn;
  dict["torn_blocks"] = stats.torn_blocks;
  dict["memory_bytes"] = stats.memory_bytes;
  dict["rows"] = stats.rows;
  return dict;
}

// Binds a spec as a value that can be printed, copied and pickled.
template <typename Spec>
py::class_<Spec> bind_spec(py::module_& module, const char* name) {
  const auto make = [](const std::vector<double>& options) {
    const auto spec = optimizer_spec_of(name_of(OptimizerSpec(Spec{})), options);
    TORCH_CHECK_VALUE(spec, error_text(ps::kPsArea, "got a pickle of another version", {},
                                       "Make the optimizer anew."));
    return std::get<Spec>(*spec);
  };
  return py::class_<Spec>(module, name)
      .def("__repr__", [](const Spec& spec) { return to_string(OptimizerSpec(spec)); })
      .def(py::pickle([](const Spec& spec) { return options_of(OptimizerSpec(spec)); }, make));
}

template <typename Spec>
void bind_adam_spec(py::module_& module, const char* name) {
  const Spec usual;
  bind_spec<Spec>(module, name)
      .def(
          py::init([](double lr, std::pair<double, double> betas, double eps, double weight_decay) {
            return Spec{lr, betas.first, betas.second, eps, weight_decay};
          }),
          py::arg("lr") = usual.lr, py::arg("betas") = std::pair(usual.beta1, usual.beta2),
          py::arg("eps") = usual.eps, py::arg("weight_decay") = usual.weight_decay);
}

void bind_optimizer_specs(py::module_& module) {
  bind_spec<SgdSpec>(module, "SgdSpec")
      .def(py::init([](double lr, double momentum, double weight_decay) {
             return SgdSpec{lr, momentum, weight_decay};
           }),
           py::arg("lr") = 1e-3, py::arg("momentum") = 0.0, py::arg("weight_decay") = 0.0);
  bind_adam_spec<AdamSpec>(module, "AdamSpec");
  bind_adam_spec<AdamWSpec>(module, "AdamWSpec");
  bind_spec<AdagradSpec>(module, "AdagradSpec")
      .def(py::init([](double lr, double eps) { return AdagradSpec{lr, eps}; }),
           py::arg("lr") = 1e-2, py::arg("eps") = 1e-10);
  bind_spec<RowwiseAdagradSpec>(module, "RowwiseAdagradSpec")
      .def(py::init([](double lr, double eps) { return RowwiseAdagradSpec{lr, eps}; }),
           py::arg("lr") = 1e-2, py::arg("eps") = 1e-10);
  bind_spec<SumSpec>(module, "SumSpec").def(py::init());
}

double number_of(const ps::Zeros& /*init*/) { return 0; }
double number_of(const ps::Normal& init) { return init.std; }
double number_of(const ps::Uniform& init) { return init.bound; }

template <typename Init>
Init init_of(double number) {
  if constexpr (std::is_same_v<Init, ps::Zeros>) {
    return {};
  } else {
    return {number};
  }
}

template <typename Init>
py::class_<Init> bind_init(py::module_& module, const char* name) {
  return py::class_<Init>(module, name)
      .def("__repr__", [](const Init& init) { return ps::to_string(ps::RowInit(init)); })
      .def(py::pickle([](const Init& init) { return number_of(init); }, &init_of<Init>));
}

void bind_row_inits(py::module_& module) {
  bind_init<ps::Zeros>(module, "PsZeros").def(py::init());
  bind_init<ps::Normal>(module, "PsNormal")
      .def(py::init([](double std) { return ps::Normal{std}; }), py::arg("std") = 1.0);
  bind_init<ps::Uniform>(module, "PsUniform")
      .def(py::init([](double bound) { return ps::Uniform{bound}; }), py::arg("bound") = 1.0);
}

// Deletes a server without the GIL, since its destructor waits for threads that use its tables.
struct EndWithoutGil {
  void operator()(ps::ParameterServer* server) const {
    const py::gil_scoped_release no_gil;
    delete server;
  }
};
using HeldServer = std::unique_ptr<ps::ParameterServer, EndWithoutGil>;

void bind_sparse_table(py::module_& module) {
  using ps::SparseTable;
  using Shared = std::shared_ptr<SparseTable>;
  py::class_<SparseTable, Shared>(module, "PsSparseTable")
      .def_property_readonly("dim", &SparseTable::dim)
      .def_property_readonly("dtype", &SparseTable::dtype)
      .def("pull", wrap_pybind_function_no_gil(&SparseTable::pull), py::arg("ids"),
           py::arg("create"))
      .def("push", wrap_pybind_function_no_gil(&SparseTable::push), py::arg("ids"),
           py::arg("gradients"), py::arg("scale"))
      .def("pull_async",
           wrap_pybind_function_no_gil([](SparseTable& table, const at::Tensor& ids, bool create) {
             return std::make_unique<Pending>(table.pull_async(ids, create));
           }),
           py::arg("ids"), py::arg("create"), py::keep_alive<0, 1>())
      .def("push_async",
           wrap_pybind_function_no_gil([](SparseTable& table, const at::Tensor& ids,
                                          const at::Tensor& gradients, double scale) {
             return std::make_unique<Pending>(table.push_async(ids, gradients, scale));
           }),
           py::arg("ids"), py::arg("gradients"), py::arg("scale"), py::keep_alive<0, 1>())
      .def("pull_with_gradient", wrap_pybind_function_no_gil(&ps::pull_with_gradient),
           py::arg("ids"), py::arg("create"))
      .def("pull_unique_with_gradient",
           wrap_pybind_function_no_gil([](const Shared& table, const at::Tensor& ids, bool create) {
             ps::UniqueRows unique = ps::pull_unique_with_gradient(table, ids, create);
             return std::pair(std::move(unique.rows), std::move(unique.places));
           }),
           py::arg("ids"), py::arg("create"))
      .def("set_lr",
           wrap_pybind_function_no_gil([](SparseTable& table, double lr) { table.set_lr(lr); }),
           py::arg("lr"))
      .def("size", wrap_pybind_function_no_gil(&SparseTable::size))
      .def("ids", wrap_pybind_function_no_gil(&SparseTable::ids));
}

void bind_table(py::module_& module) {
  using ps::DenseTable;
  py::class_<Pending>(module, "PsPending")
      .def("done", wrap_pybind_function_no_gil(&Pending::done))
      .def("wait", wrap_pybind_function_no_gil([](Pending& pending) {
             pending.wait();
             return pending.result();
           }));
  py::class_<DenseTable>(module, "PsDenseTable")
      .def_property_readonly("names", &DenseTable::tensor_names)
      .def_property_readonly("is_bound", py::cpp_function(&DenseTable::is_bound, WithoutGil()))
      .def_property_readonly("is_readable",
                             py::cpp_function(&DenseTable::is_readable, WithoutGil()))
      .def("pull", wrap_pybind_function_no_gil(&DenseTable::pull))
      .def("push", wrap_pybind_function_no_gil(&DenseTable::push), py::arg("scale"))
      .def("pull_tensors", wrap_pybind_function_no_gil([](DenseTable& table, bool view) {
             return table.pull_tensors(view).values();
           }),
           py::arg("view"))
      .def("push_tensors",
           wrap_pybind_function_no_gil(
               [](DenseTable& table, const std::vector<std::string>& names, const Tensors& tensors,
                  double scale) { table.push_tensors(named(names, tensors), scale); }),
           py::arg("names"), py::arg("tensors"), py::arg("scale"))
      .def("pull_async", wrap_pybind_function_no_gil([](DenseTable& table) {
             return std::make_unique<Pending>(table.pull_async());
           }),
           py::keep_alive<0, 1>())
      .def("pull_tensors_async", wrap_pybind_function_no_gil([](DenseTable& table, bool view) {
             return std::make_unique<Pending>(table.pull_tensors_async(view));
           }),
           py::arg("view"), py::keep_alive<0, 1>())
      .def("push_async", wrap_pybind_function_no_gil([](DenseTable& table, double scale) {
             return std::make_unique<Pending>(table.push_async(scale));
           }),
           py::arg("scale"), py::keep_alive<0, 1>())
      .def("push_tensors_async",
           wrap_pybind_function_no_gil([](DenseTable& table, const std::vector<std::string>& names,
                                          const Tensors& tensors, double scale) {
             return std::make_unique<Pending>(
                 table.push_tensors_async(named(names, tensors), scale));
           }),
           py::arg("names"), py::arg("tensors"), py::arg("scale"), py::keep_alive<0, 1>())
      .def("set_lr",
           wrap_pybind_function_no_gil([](DenseTable& table, double lr) { table.set_lr(lr); }),
           py::arg("lr"))
      .def("begin_writing", wrap_pybind_function_no_gil(&DenseTable::begin_writing))
      .def("end_writing", wrap_pybind_function_no_gil(&DenseTable::end_writing))
      .def("abandon_step", &DenseTable::abandon_writing, py::arg("reason"), WithoutGil());
}

}  // namespace

void init_parameter_server(py::module_& module) {
  bind_optimizer_specs(module);
  bind_row_inits(module);
  bind_table(module);
  bind_sparse_table(module);
  py::class_<ps::SparseOptions>(module, "PsSparseOptions")
      .def(py::init(&make_sparse_options), py::arg("init"), py::arg("seed"), py::arg("dtype"),
           py::arg("rows"), py::arg("options"));
  py::class_<ps::TableSpec>(module, "PsTableSpec")
      .def_static("sparse", &make_sparse_spec, py::arg("name"), py::arg("dim"),
                  py::arg("optimizer"), py::arg("options"))
      .def(py::init(&make_table_spec), py::arg("name"), py::arg("tensors"), py::arg("is_module"),
           py::arg("optimizer"), py::arg("options"), py::arg("buffers"));
  py::class_<ps::Options>(module, "PsOptions")
      .def(py::init())
      .def_readwrite("staleness", &ps::Options::staleness)
      .def_readwrite("backup", &ps::Options::backup)
      .def_readwrite("timeout", &ps::Options::timeout)
      .def(
          "set_mode",
          [](ps::Options& options, int64_t mode) { options.mode = static_cast<ps::Mode>(mode); },
          py::arg("mode"))
      .def(
          "set_servers",
          [](ps::Options& options, int64_t last, std::vector<int64_t> ranks) {
            options.servers = {last, std::move(ranks)};
          },
          py::arg("last"), py::arg("ranks"))
      .def("go_on_after_losses",
           [](ps::Options& options) { options.on_worker_loss = ps::WorkerLoss::kContinue; });
  using Server = ps::ParameterServer;
  py::class_<Server, HeldServer>(module, "PsServer")
      .def(py::init(wrap_pybind_function_no_gil([](std::shared_ptr<Communicator> communicator,
                                                   std::vector<ps::TableSpec> tables,
                                                   const ps::Options& options) {
             return HeldServer(new Server(std::move(communicator), std::move(tables), options));
           })),
           py::arg("communicator"), py::arg("tables"), py::arg("options"))
      .def_property_readonly("worker", &Server::worker)
      .def_property_readonly("workers", &Server::workers)
      .def("clock", wrap_pybind_function_no_gil(&Server::clock))
      .def("clocks", wrap_pybind_function_no_gil(&Server::clocks))
      .def("stats", torch::wrap_pybind_function(
                        [](const Server& server) { return dict_of(server.stats()); }))
      .def("serve", wrap_pybind_function_no_gil(&Server::serve))
      .def("save", wrap_pybind_function_no_gil(&Server::save), py::arg("path"))
      .def("load", wrap_pybind_function_no_gil(&Server::load), py::arg("path"))
      .def("leave", wrap_pybind_function_no_gil(&Server::leave))
      .def("close", &Server::close, py::arg("error"), WithoutGil())
      .def("accept", wrap_pybind_function_no_gil(&Server::accept), py::arg("store"))
      .def_static("join",
                  wrap_pybind_function_no_gil([](const c10::intrusive_ptr<c10d::Store>& store) {
                    return HeldServer(Server::join(store).release());
                  }),
                  py::arg("store"))
      .def_property_readonly("table_names", &Server::table_names)
      .def("is_sparse", &Server::is_sparse, py::arg("name"))
      .def("dense", &Server::dense, py::arg("name"), py::return_value_policy::reference_internal)
      .def("sparse", &Server::shared_sparse, py::arg("name"));
}

}  // namespace trireme
