#include <trireme/bindings/kept_call.h>

#include <trireme/bindings/saved_tensor_hooks.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

// Throws Python's present exception as torch does; torch's own function is newer than torch 2.11.
[[noreturn]] static void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

namespace kept_call {

namespace py = pybind11;

// An argument: a tensor's place, a container with places, or a value as it is.
struct Argument {
  enum class Kind { kValue, kTensor, kList, kTuple, kDict, kSame };

  Kind kind = Kind::kValue;
  py::object value;                  // the value of kValue; the keys of kDict, as a list
  std::vector<Argument> elements{};  // elements of a container
  size_t same = 0;                   // number of the list or dict that kSame repeats
};

// A guard that refuses containers that are nested too deeply.
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

// Takes arguments apart. A list or a dict that occurs twice is one object in each call.
class Taking {
 public:
  explicit Taking(std::vector<at::Tensor>& tensors) : tensors_(tensors) {}

  Argument take(py::handle given) {
    if (THPVariable_Check(given.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
      if (tensor.is_inference()) return value(given);  // autograd cannot save it
      tensors_.push_back(tensor);
      return {Argument::Kind::kTensor, py::object()};
    }
    if (PyTuple_CheckExact(given.ptr()) != 0) return take_tuple(given);
    const bool is_dict = PyDict_CheckExact(given.ptr()) != 0;
    if (!is_dict && PyList_CheckExact(given.ptr()) == 0) return value(given);
    const auto [place, is_new] = met_.emplace(given.ptr(), met_.size());
    if (!is_new) return {Argument::Kind::kSame, py::object(), {}, place->second};
    if (!is_dict) return {Argument::Kind::kList, py::object(), elements_of(given)};
    const auto values = py::reinterpret_steal<py::object>(PyDict_Values(given.ptr()));
    return {Argument::Kind::kDict, py::reinterpret_steal<py::object>(PyDict_Keys(given.ptr())),
            elements_of(values)};
  }

 private:
  static Argument value(py::handle given) {
    return {Argument::Kind::kValue, py::reinterpret_borrow<py::object>(given)};
  }

  Argument take_tuple(py::handle given) {
    Argument found{Argument::Kind::kTuple, py::object(), elements_of(given)};
    for (const Argument& element : found.elements)
      if (element.kind != Argument::Kind::kValue) return found;
    return value(given);
  }

  std::vector<Argument> elements_of(py::handle sequence) {
    const Recursion recursion;
    std::vector<Argument> elements;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i)
      elements.push_back(take(PySequence_Fast_GET_ITEM(sequence.ptr(), i)));
    return elements;
  }

  std::vector<at::Tensor>& tensors_;
  std::unordered_map<PyObject*, size_t> met_;
};

// Rebuilds arguments, in the order in which Taking has split them.
class Putting {
 public:
  explicit Putting(const std::vector<at::Tensor>& tensors) : tensors_(tensors) {}

  py::object put(const Argument& argument) {
    const size_t size = argument.elements.size();
    switch (argument.kind) {
      case Argument::Kind::kValue:
        return argument.value;
      case Argument::Kind::kTensor:
        return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors_[next_++]));
      case Argument::Kind::kSame:
        return made_[argument.same];
      case Argument::Kind::kTuple: {
        py::tuple made(size);
        for (size_t i = 0; i < size; ++i) made[i] = put(argument.elements[i]);
        return made;
      }
      case Argument::Kind::kList: {
        py::list made;
        made_.push_back(made);
        for (const Argument& element : argument.elements) made.append(put(element));
        return made;
      }
      case Argument::Kind::kDict: {
        py::dict made;
        made_.push_back(made);
        PyObject* keys = argument.value.ptr();
        for (size_t i = 0; i < size; ++i)
          made[py::handle(PyList_GET_ITEM(keys, static_cast<Py_ssize_t>(i)))] =
              put(argument.elements[i]);
        return made;
      }
    }
    TORCH_INTERNAL_ASSERT(false);
  }

 private:
  const std::vector<at::Tensor>& tensors_;
  size_t next_ = 0;
  std::vector<py::object> made_;
};

}  // namespace kept_call

namespace py = pybind11;

struct KeptCall::Python {
  py::object function;
  kept_call::Argument arguments;
  kept_call::Argument keywords;  // no value if there are none
  py::object explain;
};

KeptCall::KeptCall(py::object function, const py::tuple& arguments, const py::dict& keywords,
                   py::object explain, bool with_random)
    : python_(std::make_unique<Python>()) {
  python_->function = std::move(function);
  kept_call::Taking taking(tensors_);
  python_->arguments = taking.take(arguments);
  if (!keywords.empty()) python_->keywords = taking.take(keywords);
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
  kept_call::Putting putting(inputs);
  const py::object arguments = putting.put(python_->arguments);
  const py::object keywords = putting.put(python_->keywords);
  const ForwardStateGuard guard(state_);
  const auto result = py::reinterpret_steal<py::object>(
      PyObject_Call(python_->function.ptr(), arguments.ptr(), keywords.ptr()));
  if (!result && !clear_stop()) throw_python_error();
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
  if (!result) throw_python_error();
}

}  // namespace trireme
