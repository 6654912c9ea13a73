#include <trireme/activation/checkpoint_frame.h>
#include <trireme/activation/checkpoint_plan.h>
#include <trireme/activation/forward_state.h>
#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/bindings/bindings.h>
#include <trireme/common/exception_text.h>

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// [Note: saved tensors without Python code]
//
// Torch's hooks for saved tensors are two Python callables. Here they are C functions: pack is bound
// to a capsule with the packer, and returns a capsule with what it made; unpack takes that. So a
// saved tensor costs two calls of C functions, and a capsule.

constexpr const char* kPacker = "trireme.TensorPacker";
constexpr const char* kPacked = "trireme.PackedTensor";

PyObject* stop_type = nullptr;   // a BaseException: no `except Exception` of the user's ends it
PyObject* error_type = nullptr;  // torch.utils.checkpoint.CheckpointError

template <typename T>
void drop(PyObject* capsule, const char* name) {
  c10::intrusive_ptr<T>::reclaim(static_cast<T*>(PyCapsule_GetPointer(capsule, name)));
}

// Calls `body`, and shows Python what it throws.
template <typename Body>
PyObject* translated(const Body& body) {
  HANDLE_TH_ERRORS
  try {
    return body();
  } catch (const StopRecomputation&) {
    PyErr_SetNone(stop_type);
  } catch (const CheckpointError& error) {
    PyErr_SetString(error_type, what_of(error).c_str());
  }
  return nullptr;
  END_HANDLE_TH_ERRORS
}

PyObject* pack(PyObject* self, PyObject* tensor) {
  return translated([&] {
    auto* packer = static_cast<TensorPacker*>(PyCapsule_GetPointer(self, kPacker));
    auto packed = packer->pack(THPVariable_Unpack(tensor));
    return PyCapsule_New(packed.release(), kPacked,
                         [](PyObject* capsule) { drop<PackedTensor>(capsule, kPacked); });
  });
}

PyObject* unpack(PyObject* /*self*/, PyObject* packed) {
  return translated([&] {
    auto* held = static_cast<PackedTensor*>(PyCapsule_GetPointer(packed, kPacked));
    return THPVariable_Wrap(held->unpack());
  });
}

PyMethodDef pack_function{"pack", pack, METH_O, "Packs a tensor that autograd saves."};
PyMethodDef unpack_function{"unpack", unpack, METH_O, "Unpacks it."};

class PythonHooks : public SavedTensorHooks {
 public:
  PythonHooks() : unpack_(PyCFunction_New(&unpack_function, nullptr)) {}

  void push(c10::intrusive_ptr<TensorPacker> packer) override {
    const py::gil_scoped_acquire gil;
    const auto capsule = py::reinterpret_steal<py::object>(
        PyCapsule_New(packer.release(), kPacker,
                      [](PyObject* self) { drop<TensorPacker>(self, kPacker); }));
    at::SavedTensorDefaultHooks::lazy_initialize();
    at::SavedTensorDefaultHooks::push_hooks(
        c10::SafePyObject(PyCFunction_New(&pack_function, capsule.ptr()), getPyInterpreter()),
        c10::SafePyObject(Py_NewRef(unpack_), getPyInterpreter()));
  }

  void pop() override {
    const py::gil_scoped_acquire gil;
    at::SavedTensorDefaultHooks::pop_hooks();
  }

  void lock(std::recursive_mutex& mutex) override {
    if (PyGILState_Check() == 0) return mutex.lock();
    const py::gil_scoped_release no_gil;
    mutex.lock();
  }

 private:
  PyObject* unpack_;
};

// What a use of checkpoint() calls again. Whoever drops it takes the GIL.
struct Call {
  py::object function;
  py::tuple arguments;  // None where a tensor was, which the frame holds
  py::object keywords;  // a dict with None likewise, or None
  std::vector<Py_ssize_t> places;
  std::vector<py::object> keys;
  py::object context;  // what the recomputation runs in, or None

  py::object run(const std::vector<at::Tensor>& tensors) const {
    py::tuple again(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) again[i] = arguments[i];
    size_t next = 0;
    for (const Py_ssize_t place : places) again[place] = py::cast(tensors[next++]);
    py::object named = keywords;
    if (!keys.empty()) {
      named = keywords.attr("copy")();
      for (const py::object& key : keys) named[key] = py::cast(tensors[next++]);
    }
    PyObject* result =
        PyObject_Call(function.ptr(), again.ptr(), named.is_none() ? nullptr : named.ptr());
    if (result == nullptr) {
      if (PyErr_ExceptionMatches(stop_type) != 0) {
        PyErr_Clear();
        throw StopRecomputation{};
      }
      throw python_error();
    }
    return py::reinterpret_steal<py::object>(result);
  }
};

}  // namespace
}  // namespace trireme
