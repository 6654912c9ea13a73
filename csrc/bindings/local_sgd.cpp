#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/saving/prefixed_source.h>
#include <trireme/strategies/local_sgd/rounds.h>
#include <trireme/strategies/local_sgd/rounds_checkpoint.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// What a Python program does for rounds.
class PythonDoor final : public RoundDoor {
 public:
  PythonDoor(py::function values, py::function write, py::function step_outer)
      : values_(shared_function(std::move(values))),
        write_(shared_function(std::move(write))),
        step_outer_(shared_function(std::move(step_outer))) {}

  std::vector<at::Tensor> values(const std::vector<size_t>& parameters) override {
    const py::gil_scoped_acquire gil;
    return (*values_)(parameters).cast<std::vector<at::Tensor>>();
  }
  void write(const std::function<void()>& write) override {
    const py::gil_scoped_acquire gil;
    (*write_)(py::cpp_function([&write] {
      const py::gil_scoped_release no_gil;
      write();
    }));
  }
  void step_outer(size_t fragment, const std::vector<size_t>& parameters,
                  const std::vector<at::Tensor>& gradients) override {
    const py::gil_scoped_acquire gil;
    (*step_outer_)(fragment, parameters, gradients);
  }

 private:
  std::shared_ptr<py::function> values_;
  std::shared_ptr<py::function> write_;
  std::shared_ptr<py::function> step_outer_;
};

std::vector<RoundParameter> parameters_of(const py::list& given) {
  std::vector<RoundParameter> parameters;
  for (const py::handle& one : given) {
    const auto parameter = one.cast<py::tuple>();
    const auto anchor = parameter[2].cast<std::optional<at::Tensor>>();
    parameters.push_back({parameter[0].cast<std::string>(), parameter[1].cast<at::Tensor>(),
                          anchor.value_or(at::Tensor()), parameter[3].cast<int64_t>()});
  }
  return parameters;
}

}  // namespace

void init_local_sgd(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  py::class_<RoundOptions>(module, "RoundOptions")
      .def(py::init([](int64_t sync_every, int64_t warmup_steps, int64_t fragments,
                       int64_t fragment_sync_delay, double fragment_update_alpha,
                       std::optional<Compression> compression, bool has_outer_step) {
             RoundOptions options{
                 sync_every,          warmup_steps,          fragments,
                 fragment_sync_delay, fragment_update_alpha, std::move(compression),
                 has_outer_step};
             check(options);
             return options;
           }),
           py::kw_only(), py::arg("sync_every"), py::arg("warmup_steps") = 0,
           py::arg("fragments") = 1, py::arg("fragment_sync_delay") = 0,
           py::arg("fragment_update_alpha") = 0.0, py::arg("compression") = py::none(),
           py::arg("has_outer_step"))
      .def("__str__", [](const RoundOptions& options) { return to_string(options); });

  py::class_<WorkerRanks>(module, "WorkerRanks")
      .def(py::init([](std::shared_ptr<Communicator> across, std::shared_ptr<Communicator> inside,
                       bool have_all) {
             return WorkerRanks{std::move(across), std::move(inside), have_all};
           }),
           py::arg("across"), py::arg("inside"), py::arg("have_all"));

  py::class_<Rounds>(module, "Rounds")
      .def(py::init([](RoundOptions options, const py::list& parameters,
                       std::vector<Fragment> fragments, WorkerRanks ranks, std::string place,
                       py::function values, py::function write, py::function step_outer) {
             Rounds::Setup setup{std::move(options),
                                 parameters_of(parameters),
                                 std::move(fragments),
                                 std::move(ranks),
                                 std::move(place),
                                 std::make_shared<PythonDoor>(std::move(values), std::move(write),
                                                              std::move(step_outer))};
             const py::gil_scoped_release no_gil;
             return std::make_unique<Rounds>(std::move(setup));
           }),
           py::kw_only(), py::arg("options"), py::arg("parameters"), py::arg("fragments"),
           py::arg("ranks"), py::arg("place"), py::arg("values"), py::arg("write"),
           py::arg("step_outer"), "Each parameter: name, parameter, anchor or None, sender.")
      .def("begin", wrap_pybind_function_no_gil(&Rounds::begin))
      .def("end", wrap_pybind_function_no_gil(&Rounds::end))
      .def("after_step", wrap_pybind_function_no_gil(&Rounds::after_step))
      .def(
          "abandon", [](Rounds& rounds, const std::string& reason) { rounds.abandon(reason); },
          py::arg("reason"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("worker", [](const Rounds& rounds) { return rounds.workers().rank(); })
      .def("wait_for_fragment",
           wrap_pybind_function_no_gil([](Rounds& rounds) { rounds.wait_for_fragment(); }))
      .def("has_agreed", &Rounds::has_agreed)
      .def("take_anchors", wrap_pybind_function_no_gil(&Rounds::take_anchors))
      .def("restart",
           wrap_pybind_function_no_gil([](Rounds& rounds) { rounds.restore({}, std::nullopt); }))
      .def("set_weight", torch::wrap_pybind_function(&Rounds::set_weight), py::arg("weight"))
      .def("sent", [](const Rounds& rounds) {
        return rounds.coder() != nullptr ? rounds.coder()->sent().bytes : 0;
      });

  py::class_<RoundPart>(module, "RoundPart")
      .def(py::init([](std::string name, std::vector<int64_t> sizes, std::vector<int64_t> first) {
             return RoundPart{std::move(name), std::move(sizes), std::move(first)};
           }),
           py::arg("name"), py::arg("sizes"), py::arg("first"));
  module.def(
      "anchors_to_save",
      [](const Rounds& rounds, const std::vector<RoundPart>& parts,
         std::vector<CheckpointTensor> tensors) {
        put_anchors(rounds, parts, tensors);
        return tensors;
      },
      py::arg("rounds"), py::arg("parts"), py::arg("model"),
      "The tensors of a model with anchors in place of its parameters.");
  module.def("rounds_to_save", wrap_pybind_function_no_gil(&rounds_to_save), py::arg("rounds"),
             py::arg("parts"));
  module.def("load_rounds",
             wrap_pybind_function_no_gil([](Rounds& rounds, const std::vector<RoundPart>& parts,
                                            const std::shared_ptr<CheckpointSource>& source) {
               return load_rounds(rounds, parts, *source);
             }),
             py::arg("rounds"), py::arg("parts"), py::arg("source"));
  module.def("merge_texts_of", wrap_pybind_function_no_gil(&merge_texts_of), py::arg("worker"),
             py::arg("text"), py::arg("ranks"));
  module.def("text_as_tensor", torch::wrap_pybind_function(&text_as_tensor), py::arg("prefix"),
             py::arg("text"));
  module.def(
      "renamed",
      [](CheckpointTensor tensor, const std::string& prefix) {
        tensor.name = prefix + tensor.name;
        return tensor;
      },
      py::arg("tensor"), py::arg("prefix"));
  py::class_<PrefixedSource, std::shared_ptr<PrefixedSource>, CheckpointSource>(module,
                                                                                "PrefixedSource")
      .def(py::init(wrap_pybind_function_no_gil(
               [](const std::shared_ptr<CheckpointSource>& source, const std::string& kind,
                  const std::string& prefix, const CheckpointRanks& ranks) {
                 return std::make_shared<PrefixedSource>(*source, kind, prefix, ranks);
               })),
           py::arg("source"), py::arg("kind"), py::arg("prefix"), py::arg("ranks"),
           py::keep_alive<1, 2>());

  module.def("cut_by_bytes", torch::wrap_pybind_function(&cut_by_bytes), py::arg("bytes"),
             py::arg("count"));
  module.def("deal_by_bytes", torch::wrap_pybind_function(&deal_by_bytes), py::arg("bytes"),
             py::arg("ranks"));
  module.def("counterparts_on_hosts", wrap_pybind_function_no_gil(&counterparts_on_hosts),
             py::arg("all"));
  module.def("ranks_by_host",
             wrap_pybind_function_no_gil(
                 [](const std::shared_ptr<Communicator>& all) { return ranks_by_host(*all); }),
             py::arg("all"));
}

}  // namespace trireme
