#include <trireme/activation/checkpoint_frame.h>
#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/common/interruption.h>
#include <trireme/strategies/pipeline/batch_versions.h>
#include <trireme/strategies/pipeline/engine.h>
#include <trireme/strategies/pipeline/stage_loss.h>
#include <trireme/strategies/pipeline/threads/call_turn.h>
#include <trireme/strategies/pipeline/threads/pipeline_pass.h>
#include <trireme/strategies/pipeline/threads/pipeline_threads.h>

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;
using Weights = std::pair<py::function, py::function>;

// KeyboardInterrupt or SystemExit out of a user's function: the engine lets it pass.
class RaisedInStage final : public python_error, public Interruption {
 public:
  RaisedInStage() : Interruption("the program was interrupted in a stage") { persist(); }
};

[[noreturn]] void throw_python_error() {
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw RaisedInStage();
  python_error error;
  error.persist();
  throw error;
}

// A stage that calls Python functions. One tensor passes as itself; any other value as a list of
// tensors and a text, from which Python builds it.
class PythonStage final : public StageFunction {
 public:
  PythonStage(py::function forward, std::optional<py::function> loss)
      : forward_(shared_function(std::move(forward))),
        loss_(loss ? shared_function(std::move(*loss)) : nullptr) {}

  // Sets the functions for weights, called with a micro-batch after its backward and for its W.
  void set_weights(Weights weights) {
    begin_weights_ = shared_function(std::move(weights.first));
    finish_weights_ = shared_function(std::move(weights.second));
  }

  PipelineValue forward(int64_t micro_batch, PipelineValue input) override {
    const py::gil_scoped_acquire gil;
    const py::object given = to_python(input);
    input = {};  // so that in-place layers find no other owner
    return from_python(call(*forward_, micro_batch, given));
  }

  at::Tensor loss(int64_t micro_batch, const PipelineValue& output) override {
    TORCH_INTERNAL_ASSERT(loss_);
    const py::gil_scoped_acquire gil;
    const py::object loss = call(*loss_, micro_batch, to_python(output));
    TORCH_INTERNAL_ASSERT(THPVariable_Check(loss.ptr()));
    return THPVariable_Unpack(loss.ptr());
  }

  bool defers_weights() const override { return begin_weights_ != nullptr; }
  void begin_weights(int64_t micro_batch) override {
    call_for_weights(*begin_weights_, micro_batch);
  }
  void finish_weights(int64_t micro_batch) override {
    call_for_weights(*finish_weights_, micro_batch);
  }

 private:
  static void call_for_weights(const py::function& function, int64_t micro_batch) {
    const py::gil_scoped_acquire gil;
    call(function, micro_batch, py::none());
  }

  static py::object call(const py::function& function, int64_t micro_batch,
                         const py::object& value) {
    const py::int_ number(micro_batch);
    const std::array<PyObject*, 2> arguments{number.ptr(), value.ptr()};
    auto result = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(function.ptr(), arguments.data(), arguments.size(), nullptr));
    if (!result) throw_python_error();
    return result;
  }

  static py::object to_python(const PipelineValue& value) {
    if (value.text.empty() && value.tensors.size() == 1) {
      return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.tensors.front()));
    }
    return py::make_tuple(value.tensors, value.text);
  }

  static PipelineValue from_python(const py::object& value) {
    if (THPVariable_Check(value.ptr())) return {{THPVariable_Unpack(value.ptr())}, {}};
    auto [tensors, text] = value.cast<std::tuple<Tensors, std::string>>();
    return {std::move(tensors), std::move(text)};
  }

  std::shared_ptr<py::function> forward_, loss_;  // dropped with the GIL
  std::shared_ptr<py::function> begin_weights_, finish_weights_;
};

// Collects the parts of a loss while a Python `with` block lasts.
class LossCollector {
 public:
  void begin() { scope_.emplace(losses_); }
  void end() { scope_.reset(); }
  std::vector<std::pair<at::Tensor, double>> losses() const {
    std::vector<std::pair<at::Tensor, double>> found;
    for (const StageLoss& loss : losses_) found.emplace_back(loss.value, loss.weight);
    return found;
  }

 private:
  std::vector<StageLoss> losses_;
  std::optional<LossScope> scope_;
};

// Names and tensors, of parameters or buffers.
using Named = std::pair<std::vector<std::string>, Tensors>;
using Skip = std::tuple<std::string, int64_t, int64_t>;     // name, from stage, to stage
using Tied = std::vector<std::pair<int64_t, std::string>>;  // stage, name
using Strategies = std::vector<std::shared_ptr<DeferredSync>>;

NamedParameters to_parameters(Named named) {
  std::vector<bool> sparse(named.first.size(), false);
  return {std::move(named.first), std::move(named.second), std::move(sparse)};
}

PipelineStageRequest make_stage_request(int64_t stage, std::string name, py::function forward,
                                        std::optional<py::function> loss, Named parameters,
                                        Named buffers, Strategies strategies,
                                        std::optional<Weights> weights, bool sends_gradients) {
  PipelineStageRequest request;
  request.sends_gradients = sends_gradients;
  request.stage = stage;
  request.name = std::move(name);
  auto function = std::make_shared<PythonStage>(std::move(forward), std::move(loss));
  if (weights) function->set_weights(std::move(*weights));
  request.function = std::move(function);
  request.parameters = to_parameters(std::move(parameters));
  for (size_t i = 0; i < buffers.first.size(); ++i)
    request.buffers.emplace_back(std::move(buffers.first[i]), std::move(buffers.second[i]));
  request.strategies = std::move(strategies);
  return request;
}

std::vector<PipelineSkip> to_skips(std::vector<Skip> given) {
  std::vector<PipelineSkip> skips;
  for (auto& [name, from, to] : given) skips.push_back({std::move(name), from, to});
  return skips;
}

// Returns a runner that is destroyed without the GIL, which its threads may need.
template <typename Runner>
std::shared_ptr<Runner> without_gil(std::unique_ptr<Runner> runner) {
  return {runner.release(), [](Runner* last) {
            if (PyGILState_Check() == 0) return delete last;
            const py::gil_scoped_release gone;
            delete last;
          }};
}

std::shared_ptr<PipelineEngine> make_engine(
    const PipelineSchedule& schedule, std::vector<PipelineStageRequest> stages,
    std::shared_ptr<Communicator> communicator, bool scale_grads, std::vector<Skip> skips,
    std::vector<Tied> tied, std::shared_ptr<Communicator> replicas, bool scale_unlisted,
    const std::optional<Compression>& compression) {
  PipelineEngineOptions options{.scale_grads = scale_grads,
                                .skips = to_skips(std::move(skips)),
                                .replicas = std::move(replicas),
                                .compression = compression,
                                .scale_unlisted = scale_unlisted};
  for (Tied& holders : tied) {
    TiedParameter& parameter = options.tied.emplace_back();
    for (auto& [stage, name] : holders) parameter.holders.push_back({stage, std::move(name)});
  }
  const py::gil_scoped_release no_gil;
  return without_gil(std::make_unique<PipelineEngine>(schedule, std::move(stages),
                                                      std::move(communicator), options));
}

// Adds to the exception of a thread where it was raised, by `note` if it is a Python exception.
void keep_thread_error(const py::function& note, const std::string& where,
                       const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    raised.persist();
    const py::gil_scoped_acquire gil;
    PyErr_Clear();  // set by the autograd engine in this thread; `raised` holds it
    if (where.empty() || raised.value == nullptr) return;
    try {
      note(py::handle(raised.value), where);
    } catch (py::error_already_set& failed) {
      failed.discard_as_unraisable("a note of a pipeline");
    }
  } catch (c10::Error& raised) {
    if (!where.empty()) raised.add_context("[pipeline] raised in " + where);
  } catch (...) {
    // Other exceptions have no place for a context.
  }
}

std::shared_ptr<PipelineThreads> make_pipeline_threads(const PipelineSchedule& schedule,
                                                       std::vector<PipelineStageRequest> stages,
                                                       std::shared_ptr<WorkerPool> pool,
                                                       bool scale_grads, std::vector<Skip> skips,
                                                       py::function note) {
  PipelineThreadsRequest request{
      schedule, std::move(stages), scale_grads, to_skips(std::move(skips)),
      [note = shared_function(std::move(note))](const auto& where, const auto& error) {
        keep_thread_error(*note, where, error);
      }};
  const py::gil_scoped_release no_gil;
  return without_gil(std::make_unique<PipelineThreads>(std::move(request), std::move(pool)));
}

std::vector<PipelineValue> to_inputs(std::vector<Tensors> tensors) {
  std::vector<PipelineValue> inputs;
  inputs.reserve(tensors.size());
  for (Tensors& input : tensors) inputs.push_back({std::move(input), {}});
  return inputs;
}

std::vector<std::pair<Tensors, std::string>> to_outputs(std::vector<PipelineValue> values) {
  std::vector<std::pair<Tensors, std::string>> outputs;
  for (PipelineValue& value : values)
    outputs.emplace_back(std::move(value.tensors), std::move(value.text));
  return outputs;
}

// Calls a function when a backward is over. A Ctrl-C that ends the function is raised again later.
void tell_end(const py::function& function) {
  const py::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallOneArg(function.ptr(), Py_False);
  if (result == nullptr && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0) {
    PyErr_Clear();
    result = PyObject_CallOneArg(function.ptr(), Py_False);
    PyErr_SetInterrupt();
  }
  if (result == nullptr) PyErr_WriteUnraisable(function.ptr());
  Py_XDECREF(result);
}

// The turn of a call, for a `with` block: no Python code runs between taking and protecting it.
struct TurnOfCall {
  std::shared_ptr<CallTurn> turn;
  std::shared_ptr<PipelineRunner> runner;
};

std::vector<std::pair<Tensors, std::string>> run_pass(PipelinePass& pass,
                                                      std::vector<Tensors> inputs,
                                                      py::function around_backward,
                                                      std::shared_ptr<CallTurn> turn,
                                                      std::shared_ptr<PipelineRunner> runner) {
  const auto function = shared_function(std::move(around_backward));
  const auto around = [=](bool begins) {
    if (!begins) {
      tell_end(*function);
      return turn->give_back();
    }
    turn->take(runner.get());
    const py::gil_scoped_acquire gil;
    if (PyObject* result = PyObject_CallOneArg(function->ptr(), Py_True)) return Py_DECREF(result);
    turn->give_back();
    throw_python_error();
  };
  const py::gil_scoped_release no_gil;
  return to_outputs(pass.forward(to_inputs(std::move(inputs)), around));
}

py::dict to_dict(const StageReport& report) {
  py::dict dict;
  dict["stage"] = report.stage;
  dict["forward_ms"] = report.forward_ms;
  dict["backward_ms"] = report.backward_ms;
  dict["input_ms"] = report.input_ms;
  dict["weight_ms"] = report.weight_ms;
  dict["recompute_ms"] = report.recompute_ms;
  dict["waiting_ms"] = report.waiting_ms;
  dict["messages"] = report.messages;
  dict["bytes"] = report.bytes;
  dict["peak_live"] = report.peak_live;
  dict["peak_live_bytes"] = report.peak_live_bytes;
  return dict;
}

py::dict last_step(const PipelineRunner& runner) {
  const PipelineReport report = runner.last_step();
  py::list stages;
  for (const StageReport& stage : report.stages) stages.append(to_dict(stage));
  py::dict dict;
  dict["step"] = report.step;
  dict["step_ms"] = report.step_ms;
  dict["bubble"] = report.bubble;
  dict["computed_bubble"] = report.computed_bubble;
  dict["stages"] = stages;
  dict["sent_bytes"] = report.sent_bytes;
  dict["encode_ms"] = report.encode_ms;
  return dict;
}

}  // namespace

void init_pipeline_engine(py::module_& module) {
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;
  py::class_<PipelineRunner, std::shared_ptr<PipelineRunner>>(module, "PipelineRunner")
      .def("step",
           wrap_pybind_function_no_gil([](PipelineRunner& engine, std::vector<Tensors> inputs,
                                          bool synchronizes, std::optional<bool> divides_losses,
                                          double loss_scale) {
             return engine.step(to_inputs(std::move(inputs)), {.synchronizes = synchronizes,
                                                               .divides_losses = divides_losses,
                                                               .loss_scale = loss_scale});
           }),
           py::arg("inputs"), py::arg("synchronizes") = true,
           py::arg("divides_losses") = std::nullopt, py::arg("loss_scale") = 1.0)
      .def("eval_step",
           wrap_pybind_function_no_gil(
               [](PipelineRunner& engine, std::vector<Tensors> inputs, bool has_loss) {
                 auto [loss, values] = engine.eval_step(to_inputs(std::move(inputs)), has_loss);
                 std::optional<at::Tensor> found;
                 if (has_loss) found.emplace(std::move(loss));
                 return std::pair(std::move(found), to_outputs(std::move(values)));
               }),
           py::arg("inputs"), py::arg("has_loss"))
      .def("recover", wrap_pybind_function_no_gil(&PipelineRunner::recover))
      .def("divides_losses", wrap_pybind_function(&PipelineRunner::divides_losses))
      .def("later_copies", wrap_pybind_function(&PipelineRunner::later_copies))
      .def("kept_codes", &PipelineRunner::kept_codes)
      .def("raised_in", &PipelineRunner::raised_in)
      .def("last_step", &last_step);
  py::class_<PipelineStageRequest>(module, "PipelineStageRequest")
      .def(py::init(&make_stage_request), py::kw_only(), py::arg("stage"), py::arg("name"),
           py::arg("forward"), py::arg("loss"), py::arg("parameters"), py::arg("buffers"),
           py::arg("strategies"), py::arg("weights") = std::nullopt,
           py::arg("sends_gradients") = false);
  py::class_<PipelineEngine, PipelineRunner, std::shared_ptr<PipelineEngine>>(module,
                                                                              "PipelineEngine")
      .def(py::init(wrap_pybind_function(make_engine)), py::arg("schedule"), py::arg("stages"),
           py::arg("communicator"), py::arg("scale_grads"), py::arg("skips"), py::arg("tied"),
           py::arg("replicas") = nullptr, py::arg("scale_unlisted") = true,
           py::arg("compression") = std::nullopt)
      .def("set_parameters",
           wrap_pybind_function(
               [](PipelineEngine& engine, int64_t stage, Named parameters, Strategies strategies) {
                 engine.set_parameters(stage, to_parameters(std::move(parameters)),
                                       std::move(strategies));
               }),
           py::arg("stage"), py::arg("parameters"), py::arg("strategies"))
      .def("set_buffers", wrap_pybind_function(&PipelineEngine::set_buffers), py::arg("buffers"));
  py::class_<PipelineThreads, PipelineRunner, std::shared_ptr<PipelineThreads>>(module,
                                                                                "PipelineThreads")
      .def(py::init(wrap_pybind_function(make_pipeline_threads)), py::arg("schedule"),
           py::arg("stages"), py::arg("pool"), py::arg("scale_grads"), py::arg("skips"),
           py::arg("note"))
      .def("for_pass",
           wrap_pybind_function_no_gil(
               [](PipelineThreads& threads, int64_t micro_batches, const std::string& checkpoint) {
                 return threads.for_pass(micro_batches, recomputation(checkpoint));
               }),
           py::arg("micro_batches"), py::arg("checkpoint"));
  py::class_<BatchVersions, std::shared_ptr<BatchVersions>>(module, "BatchVersions")
      .def(py::init())
      .def("apart", wrap_pybind_function(&BatchVersions::apart), py::arg("piece"),
           py::arg("micro_batch"))
      .def("tell_batch", wrap_pybind_function(&BatchVersions::tell_batch));
  py::class_<TurnOfCall>(module, "TurnOfCall")
      .def("__enter__", wrap_pybind_function_no_gil(
                            [](const TurnOfCall& self) { self.turn->take(self.runner.get()); }))
      .def("__exit__",
           [](const TurnOfCall& self, const py::args& /*error*/) { self.turn->give_back(); });
  py::class_<CallTurn, std::shared_ptr<CallTurn>>(module, "CallTurn")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("ranks") = nullptr)
      .def(
          "of",
          [](std::shared_ptr<CallTurn> self, std::shared_ptr<PipelineRunner> runner) {
            return TurnOfCall{std::move(self), std::move(runner)};
          },
          py::arg("runner").none(true));
  py::class_<PipelinePass, std::shared_ptr<PipelinePass>>(module, "PipelinePass")
      .def(py::init<std::shared_ptr<PipelineThreads>, std::shared_ptr<BatchVersions>>(),
           py::arg("threads"), py::arg("versions"))
      .def("enter", wrap_pybind_function(&PipelinePass::enter), py::arg("input"),
           py::arg("micro_batch"))
      .def("forward", wrap_pybind_function(run_pass), py::arg("inputs"), py::arg("around_backward"),
           py::arg("turn"), py::arg("runner"));
  module.def("pipeline_pool", wrap_pybind_function(&pipeline_pool), py::arg("devices"));
  module.def("lone_communicator", [] { return ThreadGroup(1).communicator(0); });
  module.def("find_tied", wrap_pybind_function([](std::vector<std::pair<int64_t, Named>> stages) {
               std::vector<StageTensors> all;
               for (auto& [rank, named] : stages)
                 all.push_back({rank, std::move(named.first), std::move(named.second)});
               std::vector<Tied> tied;
               for (TiedParameter& parameter : find_tied(all)) {
                 Tied& holders = tied.emplace_back();
                 for (auto& holder : parameter.holders)
                   holders.emplace_back(holder.stage, std::move(holder.name));
               }
               return tied;
             }),
             py::arg("stages"));
  module.def("stash",
             wrap_pybind_function([](const std::string& name, std::optional<at::Tensor> tensor) {
               stash(name, tensor ? std::move(*tensor) : at::Tensor());
             }),
             py::arg("name"), py::arg("tensor").none(true));
  module.def("pop", wrap_pybind_function([](const std::string& name) -> std::optional<at::Tensor> {
               at::Tensor tensor = pop(name);
               return tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt;
             }),
             py::arg("name"));
  module.def("pipeline_loss", wrap_pybind_function(&pipeline_loss), py::arg("value"),
             py::arg("weight") = 1.0);
  module.def("is_checkpointing", &is_checkpointing);
  module.def("is_recomputing", &is_recomputing);
  py::class_<LossCollector>(module, "LossCollector")
      .def(py::init())
      .def("begin", &LossCollector::begin)
      .def("end", &LossCollector::end)
      .def("losses", &LossCollector::losses);
}

}  // namespace trireme
