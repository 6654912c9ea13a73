#include <trireme/bindings/bindings.h>
#include <trireme/bindings/python_values.h>
#include <trireme/bindings/remote/python_callables.h>
#include <trireme/comm/communicator.h>
#include <trireme/common/duration.h>
#include <trireme/common/error.h>
#include <trireme/strategies/remote/remote_module.h>
#include <trireme/strategies/remote/rpc_agent.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using remote::CallRequest;
using remote::PendingCallPtr;
using remote::Ref;
using remote::RemoteModule;
using remote::RpcAgent;
using remote::Value;
using remote::Verb;
using SharedRef = std::shared_ptr<Ref>;
using Timeout = std::optional<double>;  // seconds
using torch::wrap_pybind_function;
using torch::wrap_pybind_function_no_gil;

constexpr values::ValueOrigin kArgs{"remote", "args"};
constexpr values::ValueOrigin kKwargs{"remote", "kwargs"};

std::optional<std::chrono::milliseconds> milliseconds_of(Timeout timeout) {
  if (!timeout) return std::nullopt;
  const double longest = static_cast<double>(kLongestWait.count());
  // Rounds up to whole milliseconds: a wait of 0 would be over before the call has begun.
  return std::chrono::milliseconds(
      static_cast<int64_t>(std::min(std::ceil(*timeout * 1000), longest)));
}

// A call under way.
class PythonPending {
 public:
  PythonPending(std::shared_ptr<RpcAgent> agent, PendingCallPtr call)
      : agent_(std::move(agent)), call_(std::move(call)) {}

  py::object wait() const {
    Value result;
    {
      const py::gil_scoped_release released;
      result = agent_->finish(call_);
    }
    return values::python_of(result);
  }
  bool is_completed() const {
    const py::gil_scoped_release released;
    return agent_->is_done(*call_);
  }

 private:
  std::shared_ptr<RpcAgent> agent_;
  PendingCallPtr call_;
};

// A remote module that takes and returns Python values.
class PythonRemoteModule {
 public:
  PythonRemoteModule(const std::shared_ptr<RpcAgent>& agent, remote::ModuleRequest request)
      : module_(agent, std::move(request)) {}

  py::object forward(const py::tuple& args, const py::dict& kwargs, bool training) {
    const remote::Values values = values::values_of_python(args, kArgs);
    const remote::Dict keywords = values::keywords_of_python(kwargs, kKwargs);
    Value result;
    {
      const py::gil_scoped_release released;
      result = module_.forward_values(values, keywords, training);
    }
    return values::python_of(result);
  }
  int64_t owner() const { return module_.owner(); }
  void step() { module_.step(); }
  void zero_grad() { module_.zero_grad(); }
  py::dict state() {
    remote::ModuleBody::Named named;
    {
      const py::gil_scoped_release released;
      named = module_.state();
    }
    py::dict state;
    for (const auto& [name, tensor] : named) state[py::str(name)] = tensor;
    return state;
  }
  void load(const py::dict& values) {
    remote::ModuleBody::Named named;
    for (const auto& [name, tensor] : values)
      named.emplace_back(name.cast<std::string>(), tensor.cast<at::Tensor>());
    const py::gil_scoped_release released;
    module_.load(named);
  }
  at::Tensor fetch(const std::string& name) { return module_.fetch(name); }
  std::vector<std::tuple<std::string, std::vector<int64_t>, at::ScalarType, bool>> parameters() {
    std::vector<std::tuple<std::string, std::vector<int64_t>, at::ScalarType, bool>> found;
    for (const remote::RemoteParameter& parameter : module_.parameters())
      found.emplace_back(parameter.name, parameter.sizes, parameter.dtype, parameter.requires_grad);
    return found;
  }

 private:
  RemoteModule module_;
};

// An endpoint as Python sees it.
class PythonEndpoint {
 public:
  PythonEndpoint(const std::shared_ptr<Communicator>& communicator, const std::string& name,
                 int64_t threads)
      : agent_(RpcAgent::start(communicator, name, threads)) {}

  std::vector<std::string> names() const { return agent_->names(); }
  int64_t rank() const { return agent_->where().rank; }
  void stop() { agent_->stop(); }
  void abandon(const std::string& reason) noexcept { agent_->abandon(reason); }

  std::unique_ptr<PythonPending> call_async(const std::string& to, const std::string& name,
                                            const SharedRef& ref, const py::tuple& args,
                                            const py::dict& kwargs, Timeout timeout) {
    return begin(to, ref ? Verb::kMethod : Verb::kFunction, name, ref, args, kwargs, timeout);
  }
  py::object call(const std::string& to, const std::string& name, const SharedRef& ref,
                  const py::tuple& args, const py::dict& kwargs, Timeout timeout) {
    return call_async(to, name, ref, args, kwargs, timeout)->wait();
  }
  py::object create(const std::string& to, const std::string& class_name, const py::tuple& args,
                    const py::dict& kwargs, Timeout timeout) {
    return begin(to, Verb::kCreate, class_name, nullptr, args, kwargs, timeout)->wait();
  }
  SharedRef here(const py::object& object, const std::string& class_name) {
    return std::const_pointer_cast<Ref>(
        agent_->show(std::make_shared<remote::PythonHosted>(object), class_name));
  }
  py::object local_value(const Ref& ref) const {
    const auto hosted =
        std::dynamic_pointer_cast<remote::PythonHosted>(agent_->find(ref.address()));
    TORCH_CHECK_VALUE(hosted,
                      error_text("remote", "got a Ref of an earlier start(), or of C++, to show",
                                 agent_->where(), "Call its methods."));
    return hosted->object();
  }
  std::vector<std::string> methods_of(const Ref& ref) const {
    return agent_->methods_of(ref.address());
  }
  std::unique_ptr<PythonRemoteModule> module(const std::string& to, const std::string& factory,
                                             const py::tuple& args, const py::dict& kwargs,
                                             std::optional<OptimizerSpec> optimizer,
                                             Timeout timeout) {
    agent_->check_usable();
    remote::ModuleRequest request{agent_->rank_of(to),
                                  factory,
                                  values::values_of_python(args, kArgs),
                                  values::keywords_of_python(kwargs, kKwargs),
                                  std::move(optimizer),
                                  milliseconds_of(timeout)};
    const py::gil_scoped_release released;
    return std::make_unique<PythonRemoteModule>(agent_, std::move(request));
  }

 private:
  std::unique_ptr<PythonPending> begin(const std::string& to, Verb verb, const std::string& name,
                                       const SharedRef& ref, const py::tuple& args,
                                       const py::dict& kwargs, Timeout timeout) {
    agent_->check_usable();
    CallRequest request;
    if (ref) {
      request.call_object(ref);
    } else {
      request.to = agent_->rank_of(to);
    }
    request.timeout = milliseconds_of(timeout);
    request.message.verb = verb;
    request.message.name = ref ? ref->address().class_name + "." + name : name;
    request.message.args = values::values_of_python(args, kArgs);
    request.message.kwargs = values::keywords_of_python(kwargs, kKwargs);
    const py::gil_scoped_release released;
    return std::make_unique<PythonPending>(agent_, agent_->begin(std::move(request)));
  }

  std::shared_ptr<RpcAgent> agent_;
};

void define(std::string name, std::string parameters, int64_t count, std::string place,
            py::object callable, const std::string& kind, int64_t batch) {
  remote::Definition made{std::move(name)};
  made.kind = kind == "class"    ? remote::Definition::Kind::kClass
              : kind == "method" ? remote::Definition::Kind::kMethod
                                 : remote::Definition::Kind::kFunction;
  made.parameters = std::move(parameters);
  made.count = count;
  made.place = std::move(place);
  made.batch = batch;
  remote::Definitions::of_process().add(
      remote::definition_of_python(std::move(made), std::move(callable)));
}

void bind_ref(py::module_& module) {
  py::class_<Ref, SharedRef>(module, "RemoteRef")
      .def_property_readonly("owner", [](const Ref& ref) { return ref.address().owner; })
      .def_property_readonly("class_name", [](const Ref& ref) { return ref.address().class_name; })
      .def_property_readonly("number", [](const Ref& ref) { return ref.address().number; })
      .def("__eq__",
           [](const Ref& ref, const py::object& other) {
             return py::isinstance<Ref>(other) &&
                    ref.address() == other.cast<SharedRef>()->address();
           })
      .def("__hash__", [](const Ref& ref) {
        return py::hash(
            py::make_tuple(ref.address().owner, ref.address().session, ref.address().number));
      });
}

void bind_endpoint(py::module_& module) {
  py::class_<PythonEndpoint>(module, "RemoteEndpoint")
      .def(py::init<const std::shared_ptr<Communicator>&, const std::string&, int64_t>(),
           py::arg("communicator"), py::arg("name"), py::arg("threads"),
           py::call_guard<py::gil_scoped_release>())
      .def("names", &PythonEndpoint::names)
      .def_property_readonly("rank", &PythonEndpoint::rank)
      .def("stop", wrap_pybind_function_no_gil(&PythonEndpoint::stop))
      .def("abandon", &PythonEndpoint::abandon, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def("call_async", wrap_pybind_function(&PythonEndpoint::call_async), py::arg("to"),
           py::arg("name"), py::arg("ref"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"))
      .def("call", wrap_pybind_function(&PythonEndpoint::call), py::arg("to"), py::arg("name"),
           py::arg("ref"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"))
      .def("create", wrap_pybind_function(&PythonEndpoint::create), py::arg("to"), py::arg("cls"),
           py::arg("args"), py::arg("kwargs"), py::arg("timeout"))
      .def("here", wrap_pybind_function(&PythonEndpoint::here), py::arg("obj"), py::arg("cls"))
      .def("local_value", wrap_pybind_function(&PythonEndpoint::local_value), py::arg("ref"))
      .def("methods_of", wrap_pybind_function(&PythonEndpoint::methods_of), py::arg("ref"))
      .def("module", wrap_pybind_function(&PythonEndpoint::module), py::arg("to"),
           py::arg("factory"), py::arg("args"), py::arg("kwargs"), py::arg("optimizer"),
           py::arg("timeout"));
}

void bind_remote_module(py::module_& module) {
  py::class_<PythonRemoteModule>(module, "RemoteModuleHandle")
      .def("forward", wrap_pybind_function(&PythonRemoteModule::forward), py::arg("args"),
           py::arg("kwargs"), py::arg("training"))
      .def_property_readonly("owner", &PythonRemoteModule::owner)
      .def("step", wrap_pybind_function_no_gil(&PythonRemoteModule::step))
      .def("zero_grad", wrap_pybind_function_no_gil(&PythonRemoteModule::zero_grad))
      .def("state", wrap_pybind_function(&PythonRemoteModule::state))
      .def("load", wrap_pybind_function(&PythonRemoteModule::load), py::arg("values"))
      .def("parameters", wrap_pybind_function_no_gil(&PythonRemoteModule::parameters))
      .def("fetch", wrap_pybind_function_no_gil(&PythonRemoteModule::fetch), py::arg("name"));
}

}  // namespace

void init_remote(py::module_& module) {
  bind_ref(module);
  py::class_<PythonPending>(module, "RemotePending")
      .def("wait", wrap_pybind_function(&PythonPending::wait))
      .def("is_completed", wrap_pybind_function(&PythonPending::is_completed));
  bind_remote_module(module);
  bind_endpoint(module);
  module.def("remote_define", wrap_pybind_function(&define), py::arg("name"), py::arg("parameters"),
             py::arg("count"), py::arg("place"), py::arg("callable"), py::arg("kind"),
             py::arg("batch"));
  module.def("remote_use_ref_type", &values::use_ref_type, py::arg("type"));
  module.def(
      "remote_use_raiser",
      [](py::object raiser) {
        remote::PythonFailures::of_process().use_raiser(std::move(raiser));
        remote::use_failure_language(remote::PythonFailures::of_process());
      },
      py::arg("raiser"));
  module.def(
      "remote_use_describer",
      [](py::object describer) {
        remote::PythonFailures::of_process().use_describer(std::move(describer));
      },
      py::arg("describer"));
}

}  // namespace trireme
