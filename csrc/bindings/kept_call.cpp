#include <trireme/bindings/kept_call.h>

#include <trireme/bindings/saved_tensor_hooks.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <utility>

namespace trireme {
namespace kept_call {

namespace py = pybind11;

// An argument: a tensor's place, a container with places, or a value as it is.
struct Argument {
  enum class Kind { kValue, kTensor, kList, kTuple, kDict };

  Kind kind = Kind::kValue;
  py::object value;                  // what kValue is; the keys of kDict, as a list
  std::vector<Argument> elements{};  // what a container holds
};

static Argument take_apart(py::handle given, std::vector<at::Tensor>& tensors);

// Refuses containers that hold themselves.
class Recursion {
 public:
  Recursion() {
    if (Py_EnterRecursiveCall(" while arguments of checkpoint() are kept") != 0)
      throw py::error_already_set();
  }
  ~Recursion() { Py_LeaveRecursiveCall(); }
  Recursion(const Recursion&) = delete;
  Recursion& operator=(const Recursion&) = delete;
};

// `elements` is a list or a tuple: `given` itself, or the values of a dict.
static Argument take_container_apart(Argument::Kind kind, py::handle given, py::handle elements,
                                     std::vector<at::Tensor>& tensors) {
  const Recursion recursion;
  const size_t before = tensors.size();
  Argument found{kind, py::object()};
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(elements.ptr()); ++i)
    found.elements.push_back(take_apart(PySequence_Fast_GET_ITEM(elements.ptr(), i), tensors));
  if (tensors.size() == before)  // a container without tensors is a value
    return {Argument::Kind::kValue, py::reinterpret_borrow<py::object>(given)};
  if (kind == Argument::Kind::kDict)
    found.value = py::reinterpret_steal<py::object>(PyDict_Keys(given.ptr()));
  return found;
}

static Argument take_apart(py::handle given, std::vector<at::Tensor>& tensors) {
  if (THPVariable_Check(given.ptr())) {
    tensors.push_back(THPVariable_Unpack(given.ptr()));
    return {Argument::Kind::kTensor, py::object()};
  }
  if (PyList_CheckExact(given.ptr()) != 0)
    return take_container_apart(Argument::Kind::kList, given, given, tensors);
  if (PyTuple_CheckExact(given.ptr()) != 0)
    return take_container_apart(Argument::Kind::kTuple, given, given, tensors);
  if (PyDict_CheckExact(given.ptr()) != 0) {
    const auto values = py::reinterpret_steal<py::object>(PyDict_Values(given.ptr()));
    return take_container_apart(Argument::Kind::kDict, given, values, tensors);
  }
  return {Argument::Kind::kValue, py::reinterpret_borrow<py::object>(given)};
}

static py::object put_together(const Argument& argument, const std::vector<at::Tensor>& tensors,
                               size_t& next) {
  const auto element = [&](size_t i) { return put_together(argument.elements[i], tensors, next); };
  const size_t size = argument.elements.size();
  switch (argument.kind) {
    case Argument::Kind::kValue:
      return argument.value;
    case Argument::Kind::kTensor:
      return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[next++]));
    case Argument::Kind::kList: {
      py::list made(size);
      for (size_t i = 0; i < size; ++i) made[i] = element(i);
      return made;
    }
    case Argument::Kind::kTuple: {
      py::tuple made(size);
      for (size_t i = 0; i < size; ++i) made[i] = element(i);
      return made;
    }
    case Argument::Kind::kDict: {
      py::dict made;
      for (size_t i = 0; i < size; ++i) {
        const py::object value = element(i);
        made[py::handle(PyList_GET_ITEM(argument.value.ptr(), static_cast<Py_ssize_t>(i)))] = value;
      }
      return made;
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace kept_call

namespace py = pybind11;

struct KeptCall::Python {
  py::object function;
  kept_call::Argument arguments;
  kept_call::Argument keywords;
  py::object explain;
};

KeptCall::KeptCall(py::object function, const py::tuple& arguments, const py::dict& keywords,
                   py::object explain, bool with_random)
    : python_(std::make_unique<Python>()) {
  python_->function = std::move(function);
  python_->arguments = kept_call::take_apart(arguments, tensors_);
  python_->keywords = kept_call::take_apart(keywords, tensors_);
  python_->explain = std::move(explain);
  state_ = ForwardState::capture(with_random, tensors_);
}

KeptCall::~KeptCall() {
  const py::gil_scoped_acquire gil;
  python_.reset();
}

std::vector<at::Tensor> KeptCall::take_tensors() { return std::exchange(tensors_, {}); }

void KeptCall::run(const std::vector<at::Tensor>& inputs) {
  const py::gil_scoped_acquire gil;
  size_t next = 0;
  const py::object arguments = kept_call::put_together(python_->arguments, inputs, next);
  const py::object keywords = kept_call::put_together(python_->keywords, inputs, next);
  const ForwardStateGuard guard(state_);
  const auto result = py::reinterpret_steal<py::object>(
      PyObject_Call(python_->function.ptr(), arguments.ptr(), keywords.ptr()));
  if (!result && !clear_stop()) torch::throw_python_error();
}

std::string KeptCall::name() const {
  const py::gil_scoped_acquire gil;
  const py::object function = py::getattr(python_->function, "__wrapped__", python_->function);
  const py::object named =
      py::hasattr(function, "__qualname__") ? function : py::type::of(function);
  return py::str(named.attr("__qualname__"));
}

void KeptCall::explain(const std::string& text) const {
  const py::gil_scoped_acquire gil;
  if (python_->explain.is_none()) return;
  const auto result = py::reinterpret_steal<py::object>(
      PyObject_CallOneArg(python_->explain.ptr(), py::str(text).ptr()));
  if (!result) torch::throw_python_error();
}

}  // namespace trireme
