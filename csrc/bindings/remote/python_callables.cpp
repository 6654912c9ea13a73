#include <trireme/bindings/remote/python_callables.h>

#include <trireme/bindings/python_values.h>
#include <trireme/common/error.h>
#include <trireme/common/thread_end.h>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cxxabi.h>
#include <unistd.h>
#include <utility>

// [Note: threads at the end of Python]
//
// A thread that takes the GIL while the interpreter ends is unwound by it (up to 3.13), through C++
// frames whose destructors take the GIL again. Such a thread serves a call whose result nobody will
// get, so it is stopped where it is until the process ends, as newer interpreters do.

namespace trireme::remote {
namespace {

namespace py = pybind11;

constexpr values::ValueOrigin kResult{"remote", "the result"};

template <typename F>
auto or_stay_here(const F& function) {
  try {
    return function();
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();
  }
}

// Python's state of this thread, kept between calls: making one takes longer than a small call.
class KeptThreadState {
 public:
  KeptThreadState() : state_(PyGILState_Ensure()), saved_(PyEval_SaveThread()) {}
  ~KeptThreadState() {
    or_stay_here([&] {
      PyEval_RestoreThread(saved_);
      // Clears the thread's own objects while the state is whole: otherwise destructors that take
      // the GIL again would end the state a second time (Python 3.11).
      if (PyObject* own = PyThreadState_GetDict()) PyDict_Clear(own);
      PyGILState_Release(state_);
    });
  }
  KeptThreadState(const KeptThreadState&) = delete;
  KeptThreadState& operator=(const KeptThreadState&) = delete;

 private:
  PyGILState_STATE state_;
  PyThreadState* saved_;
};

// Calls `function` with the GIL, on a thread that serves calls.
template <typename F>
auto with_gil(const F& function) {
  return or_stay_here([&] {
    if (PyGILState_GetThisThreadState() == nullptr) {
      thread_local std::optional<KeptThreadState> kept;
      kept.emplace();
      at_thread_end([] { kept.reset(); });
    }
    const py::gil_scoped_acquire gil;
    return function();
  });
}

py::object call(const py::object& function, const py::tuple& args, const py::dict& kwargs) {
  PyObject* result =
      or_stay_here([&] { return PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()); });
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::dict keywords_of(const Dict& kwargs) { return python_of(Value(kwargs)).cast<py::dict>(); }

py::object call_with(const py::object& function, const Invocation& invocation) {
  return call(function, python_of(invocation.args), keywords_of(invocation.kwargs));
}

std::shared_ptr<py::object> shared_object(py::object object) {
  return {new py::object(std::move(object)), [](py::object* last) {
            or_stay_here([&] {
              const py::gil_scoped_acquire gil;
              delete last;
            });
          }};
}

// A torch.nn.Module.
class PythonBody final : public ModuleBody {
 public:
  explicit PythonBody(py::object module) : module_(shared_object(std::move(module))) {}

  const void* identity() const override { return module_->ptr(); }

  Value forward(const Values& args, const Dict& kwargs) override {
    return with_gil([&] {
      return values::value_of_python(call_with(*module_, {nullptr, args, kwargs}), kResult);
    });
  }
  Named parameters() override {
    return with_gil([&] { return named_of(module_->attr("named_parameters")()); });
  }
  Named state() override {
    return with_gil([&] {
      return named_of(module_->attr("state_dict")(py::arg("keep_vars") = true).attr("items")());
    });
  }
  void set_training(bool training) override {
    with_gil([&] { module_->attr("train")(training); });
  }

 private:
  static Named named_of(const py::object& pairs) {
    Named named;
    for (const py::handle pair : pairs) {
      const auto [name, value] = pair.cast<std::pair<std::string, py::object>>();
      TORCH_CHECK_TYPE(
          THPVariable_Check(value.ptr()),
          error_text("remote", "got '" + name + "' in a state dict, which is no tensor", {},
                     "Keep extra state out of modules that others call."));
      named.emplace_back(name, THPVariable_Unpack(value.ptr()));
    }
    return named;
  }

  std::shared_ptr<py::object> module_;
};

std::shared_ptr<ModuleBody> body_of(const py::object& made) {
  static auto* module_type = new py::object(py::module_::import("torch.nn").attr("Module"));
  TORCH_CHECK_TYPE(py::isinstance(made, *module_type),
                   error_text("remote",
                              std::string("got a ") + Py_TYPE(made.ptr())->tp_name +
                                  " of a factory, expected a torch.nn.Module",
                              {}, "Return a module."));
  py::module_::import("trireme.remote.owned").attr("check_owned")(made);
  return std::make_shared<PythonBody>(made);
}

py::tuple with_object(const PythonHosted& hosted, const Values& args) {
  py::tuple all(args.size() + 1);
  all[0] = hosted.object();
  for (size_t i = 0; i < args.size(); ++i) all[i + 1] = python_of(args[i]);
  return all;
}

}  // namespace

PythonHosted::PythonHosted(py::object object) : object_(shared_object(std::move(object))) {}

Definition definition_of_python(Definition made, py::object callable) {
  const auto held = shared_object(std::move(callable));
  made.language = "Python";
  switch (made.kind) {
    case Definition::Kind::kFunction:
      made.call = [held](const Invocation& invocation) {
        return with_gil(
            [&] { return values::value_of_python(call_with(*held, invocation), kResult); });
      };
      made.make_module = [held](const Invocation& invocation) {
        return with_gil([&] { return body_of(call_with(*held, invocation)); });
      };
      break;
    case Definition::Kind::kClass:
      made.make_object = [held](const Invocation& invocation) -> std::shared_ptr<Hosted> {
        return with_gil(
            [&] { return std::make_shared<PythonHosted>(call_with(*held, invocation)); });
      };
      break;
    case Definition::Kind::kMethod:
      made.call = [held](const Invocation& invocation) {
        return with_gil([&] {
          const auto& hosted = dynamic_cast<const PythonHosted&>(*invocation.object);
          return values::value_of_python(
              call(*held, with_object(hosted, invocation.args), keywords_of(invocation.kwargs)),
              kResult);
        });
      };
  }
  return made;
}

PythonFailures& PythonFailures::of_process() {
  static auto* failures = new PythonFailures;
  return *failures;
}

void PythonFailures::use_raiser(py::object raiser) {
  delete raiser_;
  raiser_ = new py::object(std::move(raiser));
}

void PythonFailures::use_describer(py::object describer) {
  delete describer_;
  describer_ = new py::object(std::move(describer));
}

void PythonFailures::raise(const Failure& failure) {
  const py::gil_scoped_acquire gil;
  call(*raiser_,
       py::make_tuple(failure.type, failure.module, failure.text, failure.traceback, failure.where),
       py::dict());
  C10_THROW_ERROR(Error, error_text("remote", failure.where + " failed: " + failure.text, {},
                                    "Look at that process."));
}

std::optional<Failure> PythonFailures::describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& raised) {
    return with_gil([&] {
      const py::object value = raised.value();
      // Up to Python 3.11 an exception has its traceback only once an except clause has taken it.
      if (raised.trace()) PyException_SetTraceback(value.ptr(), raised.trace().ptr());
      const auto [type, module, text, traceback] =
          call(*describer_, py::make_tuple(value), py::dict())
              .cast<std::tuple<std::string, std::string, std::string, std::string>>();
      return Failure{type, module, text, traceback, {}};
    });
  } catch (python_error& raised) {  // a backward throws it
    return with_gil([&] {
      raised.restore();
      return describe(std::make_exception_ptr(py::error_already_set()));
    });
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace trireme::remote
