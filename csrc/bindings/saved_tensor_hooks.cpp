#include <trireme/bindings/saved_tensor_hooks.h>

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/exception_text.h>

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <structmember.h>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// [Note: saved tensors without Python code]
//
// Torch's hooks for saved tensors are two callables of Python. Here both are written in C: pack is
// an object of the type PackHook, which holds a packer and returns a capsule with its
// PackedSavedTensor; unpack is a function that takes such a capsule. So a saved tensor costs two
// calls of C functions.
//
// Torch's selective policies ask the hooks on top of the stack whether they are a checkpoint's
// (`_checkpoint_internal`), and if so which user hooks are below (`_user_hooks`).

constexpr const char* kPacked = "trireme.PackedSavedTensor";

PyObject* stop_type = nullptr;  // an Exception: modules run always_call hooks for no other

// Calls `body`, and raises in Python the exceptions that it throws.
template <typename Body>
PyObject* translated(const Body& body) {
  HANDLE_TH_ERRORS
  try {
    return body();
  } catch (const CheckpointError& error) {
    const py::object type = py::module_::import("torch.utils.checkpoint").attr("CheckpointError");
    PyErr_SetString(type.ptr(), what_of(error).c_str());
  }
  return nullptr;
  END_HANDLE_TH_ERRORS
}

void drop_packed(PyObject* capsule) {
  c10::intrusive_ptr<PackedSavedTensor>::reclaim(
      static_cast<PackedSavedTensor*>(PyCapsule_GetPointer(capsule, kPacked)));
}

struct PackHook {
  PyObject_HEAD vectorcallfunc call;
  SavedTensorPacker* packer;  // owned
  PyObject* user_hooks;       // the user hooks below, as long as it is on the stack
};

PyTypeObject* pack_hook_type = nullptr;

// The hooks that this thread has pushed; torch's stack owns them.
thread_local std::vector<PyObject*> pushed;

PyObject* pack(PyObject* self, PyObject* const* arguments, size_t /*count*/, PyObject* /*names*/) {
  return translated([&] {
    auto packed = reinterpret_cast<PackHook*>(self)->packer->pack(THPVariable_Unpack(arguments[0]));
    if (!packed) {
      PyErr_SetNone(stop_type);
      return static_cast<PyObject*>(nullptr);
    }
    return PyCapsule_New(packed.release(), kPacked, drop_packed);
  });
}

PyObject* unpack(PyObject* /*self*/, PyObject* packed) {
  return translated([&] {
    // The capsule may be freed while its tensor is recomputed.
    const auto held = c10::intrusive_ptr<PackedSavedTensor>::reclaim_copy(
        static_cast<PackedSavedTensor*>(PyCapsule_GetPointer(packed, kPacked)));
    return THPVariable_Wrap(held->unpack());
  });
}

void drop_pack_hook(PyObject* self) {
  auto* hook = reinterpret_cast<PackHook*>(self);
  PyTypeObject* type = Py_TYPE(self);
  c10::intrusive_ptr<SavedTensorPacker>::reclaim(hook->packer);
  Py_XDECREF(hook->user_hooks);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* is_internal(PyObject* self, void* /*unused*/) {
  return PyBool_FromLong(reinterpret_cast<PackHook*>(self)->packer->is_checkpoint() ? 1 : 0);
}

PyObject* user_hooks(PyObject* self, void* /*unused*/) {
  PyObject* found = reinterpret_cast<PackHook*>(self)->user_hooks;
  return Py_NewRef(found != nullptr ? found : Py_None);
}

PyTypeObject* make_pack_hook_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(PackHook, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"_checkpoint_internal", is_internal, nullptr, nullptr, nullptr},
      {"_user_hooks", user_hooks, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(drop_pack_hook)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_members, members},
                                {Py_tp_getset, attributes},
                                {0, nullptr}};
  static PyType_Spec spec{"trireme._C.PackHook", sizeof(PackHook), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

// Returns whether a hook identifies tensors by the order in which one thread saves them, as the
// hooks of checkpoints do, ours and torch's. Expects the GIL.
bool is_ordered(py::handle hook) {
  if (Py_TYPE(hook.ptr()) == pack_hook_type)
    return reinterpret_cast<PackHook*>(hook.ptr())->packer->is_ordered();
  const py::object module = py::getattr(hook, "__module__", py::none());
  return py::isinstance<py::str>(module) && module.cast<std::string>() == "torch.utils.checkpoint";
}

// Returns the user hooks that would pack a tensor saved now if there were no checkpoint, or
// nullptr.
PyObject* find_user_hooks() {
  const auto top = at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true);
  if (!top) return nullptr;
  PyObject* first = top->first.ptr(getPyInterpreter());
  const bool is_ours = Py_TYPE(first) == pack_hook_type;
  if (is_ours && reinterpret_cast<PackHook*>(first)->packer->is_checkpoint())
    return Py_XNewRef(reinterpret_cast<PackHook*>(first)->user_hooks);
  const py::handle hook = first;
  if (!is_ours && py::getattr(hook, "_checkpoint_internal", py::bool_(false)).cast<bool>()) {
    py::object found = py::getattr(hook, "_user_hooks", py::none());
    return found.is_none() ? nullptr : found.release().ptr();
  }
  return PyTuple_Pack(2, first, top->second.ptr(getPyInterpreter()));
}

// Returns whether a function of torch's reentrant checkpoints is among the callers. Some 50 ns for
// each caller.
bool is_in_reentrant_checkpoint() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::array<py::object, 2>> storage;
  const auto find = [] {
    const py::object function =
        py::module_::import("torch.utils.checkpoint").attr("CheckpointFunction");
    return std::array<py::object, 2>{function.attr("forward").attr("__code__"),
                                     function.attr("backward").attr("__code__")};
  };
  const auto& codes = storage.call_once_and_store_result(find).get_stored();
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* now = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(now)));
    if (code.is(codes[0]) || code.is(codes[1])) return true;
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(now)));
  }
  return false;
}

// One call of a torch checkpoint; see trireme/_core/torch_checkpoints.py.
class TorchRun : public CheckpointRun {
 public:
  explicit TorchRun(py::object run)
      : run_(std::move(run)), is_recomputation_(run_.attr("is_recomputation").cast<bool>()) {}
  ~TorchRun() override {
    const py::gil_scoped_acquire gil;
    run_.release().dec_ref();
  }
  bool is_recomputation() const override { return is_recomputation_; }
  void keep(const std::vector<at::Tensor>& result) override {
    const py::gil_scoped_acquire gil;
    run_.attr("keep")(result);
  }
  std::vector<at::Tensor> take() override {
    const py::gil_scoped_acquire gil;
    return run_.attr("take")().cast<std::vector<at::Tensor>>();
  }

 private:
  py::object run_;
  bool is_recomputation_;
};

// A packer's scope on a job's thread: watches operators and calls end(), as PackerGuard does.
struct WatchedJob {
  explicit WatchedJob(c10::intrusive_ptr<SavedTensorPacker> packer) : packer(std::move(packer)) {}
  ~WatchedJob() { packer->end(); }
  WatchedJob(const WatchedJob&) = delete;
  WatchedJob& operator=(const WatchedJob&) = delete;

  OperatorWatch watch;
  c10::intrusive_ptr<SavedTensorPacker> packer;
};

class PythonHooks : public SavedTensorHooks {
 public:
  PythonHooks() {
    static PyMethodDef method{"unpack", unpack, METH_O, "Unpacks what autograd has saved."};
    unpack_ = PyCFunction_New(&method, nullptr);
  }

  void push(c10::intrusive_ptr<SavedTensorPacker> packer) override {
    const py::gil_scoped_acquire gil;
    at::SavedTensorDefaultHooks::lazy_initialize();
    PyObject* below = find_user_hooks();
    auto* hook = PyObject_New(PackHook, pack_hook_type);
    if (hook == nullptr) throw py::error_already_set();
    hook->call = pack;
    hook->packer = packer.release();
    hook->user_hooks = below;
    at::SavedTensorDefaultHooks::push_hooks(
        c10::SafePyObject(reinterpret_cast<PyObject*>(hook), getPyInterpreter()),
        c10::SafePyObject(Py_NewRef(unpack_), getPyInterpreter()));
    pushed.push_back(reinterpret_cast<PyObject*>(hook));
  }

  void pop() override {
    const py::gil_scoped_acquire gil;
    PyObject* own = pushed.back();
    pushed.pop_back();
    // An exception may have left user hooks above.
    do {
      const auto hooks = at::SavedTensorDefaultHooks::pop_hooks();
      if (hooks.first.ptr(getPyInterpreter()) != own) continue;
      // The graph keeps the hook, which would keep the user hooks and all objects that they reach.
      Py_CLEAR(reinterpret_cast<PackHook*>(own)->user_hooks);
      return;
    } while (at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true));
  }

  std::function<std::shared_ptr<void>()> carried() override {
    const auto top = at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true);
    if (!top) return {};
    c10::intrusive_ptr<SavedTensorPacker> watching;
    {
      const py::gil_scoped_acquire gil;
      PyObject* hook = top->first.ptr(getPyInterpreter());
      if (is_ordered(hook)) return {};
      if (Py_TYPE(hook) == pack_hook_type) {
        auto* packer = reinterpret_cast<PackHook*>(hook)->packer;
        if (packer->watches_operators())
          watching = c10::intrusive_ptr<SavedTensorPacker>::reclaim_copy(packer);
      }
    }
    return [watching, state = at::SavedTensorDefaultHooks::get_tls_state()] {
      at::SavedTensorDefaultHooks::set_tls_state(state);  // the job ends with that of its thread
      return watching ? std::make_shared<WatchedJob>(watching) : std::shared_ptr<void>();
    };
  }

  // Torch's operators throw Python's exceptions as a C++ exception, python_error.
  bool is_stop(const std::exception_ptr& error) override {
    try {
      std::rethrow_exception(error);
    } catch (python_error& raised) {
      const py::gil_scoped_acquire gil;
      raised.restore();
      if (clear_stop()) return true;
      PyErr_Clear();  // `raised` still holds it
      return false;
    } catch (...) {
      return SavedTensorHooks::is_stop(error);
    }
  }

  int64_t current_task() override {
    const auto& group = c10::AutogradState::get_tls_state().get_graph_exec_group();
    return group ? id_of(group->ptr(getPyInterpreter())) : SavedTensorHooks::current_task();
  }

  // Reentrant checkpoints run the forward without gradients, and repeat it inside of a node.
  static bool may_be_reentrant() {
    return !at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() >= 0;
  }
  bool may_have_runs_of_others() override {
    return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty() || may_be_reentrant();
  }
  CheckpointRuns runs_of_others() override {
    if (!may_have_runs_of_others()) return {};
    const py::gil_scoped_acquire gil;
    const bool is_reentrant = may_be_reentrant() && is_in_reentrant_checkpoint();
    auto stack = at::SavedTensorDefaultHooks::get_tls_state().stack;
    py::list hooks;
    for (; !stack.empty(); stack.pop()) {
      PyObject* hook = stack.top().first.ptr(getPyInterpreter());
      if (Py_TYPE(hook) != pack_hook_type) hooks.append(py::handle(hook));
    }
    if (hooks.empty() && !is_reentrant) return {};
    CheckpointRuns runs;
    const py::object find =
        py::module_::import("trireme._core.torch_checkpoints").attr("runs_under_way");
    for (const py::handle run : find(hooks, is_reentrant))
      runs.push_back(std::make_unique<TorchRun>(py::reinterpret_borrow<py::object>(run)));
    return runs;
  }

  void lock(std::recursive_mutex& mutex) override {
    if (PyGILState_Check() == 0) return mutex.lock();
    const py::gil_scoped_release no_gil;
    mutex.lock();
  }

 private:
  // Returns the number of a GraphExecGroup of torch, under which several backwards count as one.
  static int64_t id_of(py::handle group) {
    static int64_t next = int64_t{-1} << 62;  // far from the ids of SavedTensorHooks
    const py::gil_scoped_acquire gil;
    if (!py::hasattr(group, "_trireme_task")) group.attr("_trireme_task") = next++;
    return group.attr("_trireme_task").cast<int64_t>();
  }

  PyObject* unpack_;
};

}  // namespace

bool clear_stop() {
  py::error_already_set error;
  const bool may_be = PyErr_GivenExceptionMatches(error.value().ptr(), PyExc_Exception) != 0;
  auto seen = py::reinterpret_borrow<py::object>(error.value());
  while (seen && PyErr_GivenExceptionMatches(seen.ptr(), stop_type) == 0)
    seen = py::reinterpret_steal<py::object>(PyException_GetContext(seen.ptr()));
  if (seen && may_be) return true;
  error.restore();
  return false;
}

void use_python_hooks(py::module_& module) {
  stop_type = PyErr_NewException("trireme._C.StopRecomputation", PyExc_Exception, nullptr);
  if (stop_type == nullptr) throw py::error_already_set();
  module.attr("StopRecomputation") = py::handle(stop_type);
  pack_hook_type = make_pack_hook_type();
  SavedTensorHooks::use(*new PythonHooks);  // lives as long as the process
}

}  // namespace trireme
