#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/comm/agree.h>
#include <trireme/comm/backend/p2p.h>
#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/c10d/custom_communicator.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/comm/launch/make_communicator.h>
#include <trireme/comm/run_together.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/interruption.h>

#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace trireme {

namespace py = pybind11;

namespace {

// Returns a Work that keeps its Python object alive, since its class may be one of Python's.
std::shared_ptr<c10d::Work> held_work(const py::object& work) {
  if (work.is_none()) return nullptr;
  c10d::Work* inside = py::cast<c10::intrusive_ptr<c10d::Work>>(work).get();
  const std::shared_ptr<py::object> held(new py::object(work), [](py::object* last) {
    const py::gil_scoped_acquire gil;
    delete last;
  });
  return {held, inside};
}

CustomCollective collective_of(std::optional<py::function> allocate,
                               std::optional<py::function> start) {
  if (!allocate || !start) return {};
  return {[allocate = shared_function(std::move(*allocate))](int64_t numel, at::ScalarType dtype,
                                                             c10::Device device) {
            const py::gil_scoped_acquire gil;
            return py::cast<at::Tensor>((*allocate)(numel, dtype, device));
          },
          [start = shared_function(std::move(*start))](const at::Tensor& output,
                                                       const at::Tensor& input) {
            const py::gil_scoped_acquire gil;
            return held_work((*start)(output, input));
          }};
}

// [Note: signals while a rank waits]
//
// Python runs the handlers of signals between two instructions of its main thread, and a collective
// is one instruction. So the main thread runs them itself while it waits, about every 50 ms. For
// that it takes the GIL, at most once in 50 ms and never in a shorter wait, and releases it at
// once, so that other threads hardly notice. The thread holds no lock of ours meanwhile, and no
// code of ours waits for a peer while it holds the GIL, so there is no deadlock. (Foreign code that
// holds the GIL on another thread until this very wait is over would cause one; it would block the
// main thread in any case.)
//
// An exception that a handler raises ends the wait (see common/interruption.h).
class RaisedInSignalHandler final : public py::error_already_set, public Interruption {
 public:
  // Expects the GIL, and a Python error set.
  RaisedInSignalHandler() : Interruption({}) {
    reason = py::str(type().attr("__name__")).cast<std::string>();
    try {
      const auto text = py::str(value()).cast<std::string>();
      if (!text.empty()) reason += " (" + text + ")";
    } catch (const std::exception&) {  // leaves out the text
    }
    reason += " was raised by a signal handler while it waited";
  }
};

void run_signal_handlers() {
  if (::gettid() != ::getpid() || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_Occurred() != nullptr) return;  // set when an exception's unwinding destroys a group
  if (PyErr_CheckSignals() != 0) throw RaisedInSignalHandler();
}

// Returns str() of an exception, which may fail, or have characters that UTF-8 cannot encode.
std::string text_of_python(py::handle value) {
  if (!value) return {};
  const auto text = py::reinterpret_steal<py::object>(PyObject_Str(value.ptr()));
  const auto bytes = py::reinterpret_steal<py::object>(
      text ? PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace") : nullptr);
  if (bytes) return PyBytes_AsString(bytes.ptr());
  PyErr_Clear();
  return "<its text cannot be made>";
}

// Returns "ValueError: no such file" for an exception that Python raised; empty for others.
std::string name_python_exception(const std::exception& error) {
  const auto* raised = dynamic_cast<const python_error*>(&error);
  if (raised == nullptr) return {};
  const py::gil_scoped_acquire gil;  // errors are taken over under it, too
  if (raised->type == nullptr) return {};
  const py::error_scope kept;  // the autograd engine may have set an error in this thread
  const auto type = py::handle(raised->type).attr("__name__").cast<std::string>();
  const std::string text = text_of_python(raised->value);
  return text.empty() ? type : type + ": " + text;
}

std::optional<std::pair<int64_t, std::string>> first_failure(
    const std::optional<std::string>& own, const std::shared_ptr<Communicator>& communicator,
    c10::Device device) {
  auto failed = run_together([&] { TORCH_CHECK(!own, *own); }, *communicator, device);
  if (!failed) return std::nullopt;
  return std::pair(failed->rank, std::move(failed->text));
}

}  // namespace

void init_comm(py::module_& module) {
  set_interruption_check(&run_signal_handlers);
  set_exception_namer(&name_python_exception);

  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world", &Communicator::world)
      .def_property_readonly("device", &Communicator::device)
      .def_property_readonly("failure", &Communicator::failure)
      .def("announce_failure", &Communicator::announce_failure, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def("recover", torch::wrap_pybind_function_no_gil(&Communicator::recover));

  py::class_<CustomCommunicator, Communicator, std::shared_ptr<CustomCommunicator>>(
      module, "CustomCommunicator")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("inner"))
      .def(
          "set_all_gather",
          [](CustomCommunicator& self, std::optional<py::function> allocate,
             std::optional<py::function> start) {
            self.set_all_gather(collective_of(std::move(allocate), std::move(start)));
          },
          py::arg("allocate"), py::arg("start"))
      .def(
          "set_reduce_scatter",
          [](CustomCommunicator& self, std::optional<py::function> allocate,
             std::optional<py::function> start) {
            self.set_reduce_scatter(collective_of(std::move(allocate), std::move(start)));
          },
          py::arg("allocate"), py::arg("start"));

  module.def("make_communicator", torch::wrap_pybind_function(make_communicator), py::arg("group"),
             py::arg("store"));

  using torch::wrap_pybind_function_no_gil;
  module.def("gather_texts",
             wrap_pybind_function_no_gil(
                 [](const std::string& own, const std::shared_ptr<Communicator>& communicator,
                    c10::Device device) { return gather_texts(own, *communicator, device); }),
             py::arg("own"), py::arg("communicator"), py::arg("device"));
  module.def("broadcast_text",
             wrap_pybind_function_no_gil(
                 [](const std::string& own, const std::shared_ptr<Communicator>& communicator,
                    c10::Device device) { return broadcast_text(own, 0, *communicator, device); }),
             py::arg("own"), py::arg("communicator"), py::arg("device"), "The text of rank 0.");
  module.def(
      "compare_texts",
      wrap_pybind_function_no_gil(
          [](const std::string& own, const std::shared_ptr<Communicator>& communicator, bool flag) {
            const ComparedText text{own, "batch of a step", flag};
            const auto found = compare_texts(text, *communicator, communicator->device());
            return std::pair(found.are_equal, found.any_flag);
          }),
      py::arg("own"), py::arg("communicator"), py::arg("flag") = false);
  module.def("as_complaint", &as_complaint, py::arg("why"));
  module.def(
      "first_complaint",
      [](const std::vector<std::string>& texts) {
        const auto found = first_complaint(texts);
        return found ? std::optional(std::pair(found->rank, found->text)) : std::nullopt;
      },
      py::arg("texts"));
  module.def("first_failure", wrap_pybind_function_no_gil(&first_failure), py::arg("own"),
             py::arg("communicator"), py::arg("device"),
             "The first rank that passes an error as `own`, and what it says.");
  module.def("make_shm_backend",
             wrap_pybind_function_no_gil(
                 [](const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t world,
                    std::chrono::milliseconds timeout, const std::string& host_partition) {
                   ShmOptions options;
                   options.timeout = timeout;
                   options.connect_timeout = connect_timeout_of(timeout);
                   options.host_partition = host_partition;
                   return make_shm_backend(store, {rank, world}, options);
                 }),
             py::arg("store"), py::arg("rank"), py::arg("world"), py::arg("timeout"),
             py::arg("host_partition") = "",
             "The c10d backend \"trireme\"; see comm/backend/shm_backend.h.");
  module.def("close_all_p2p", &close_all_p2p, py::call_guard<py::gil_scoped_release>(),
             "For the end of the process: waits until peers can receive what was sent to them.");
  module.def("leave_all_groups", &leave_all_groups, py::arg("error"),
             py::call_guard<py::gil_scoped_release>(),
             "For the end of the process: tells the peers by which error, or by none if empty.");
}

}  // namespace trireme
