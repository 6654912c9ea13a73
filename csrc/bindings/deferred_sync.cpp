#include <trireme/sync/deferred_sync.h>

#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <string>
#include <utility>

namespace trireme {
namespace {

namespace py = pybind11;

// A strategy unknown to the core, by its Python functions.
class PythonStrategy final : public DeferredSync {
 public:
  PythonStrategy(py::function hold, py::function prepare, py::function finish)
      : hold_(shared_function(std::move(hold))),
        prepare_(shared_function(std::move(prepare))),
        finish_(shared_function(std::move(finish))) {}

  void hold(bool held) override {
    const py::gil_scoped_acquire gil;
    const py::bool_ flag(held);
    call(*hold_, flag.ptr());
  }
  void prepare_for_backward() override {
    const py::gil_scoped_acquire gil;
    call(*prepare_, nullptr);
  }
  void synchronize_unreached() override {
    const py::gil_scoped_acquire gil;
    call(*finish_, nullptr);
  }
  // Does nothing: the strategy's ranks have a deadline of their own.
  void announce_failure(const std::string& /*text*/) noexcept override {}

 private:
  static void call(const py::function& function, PyObject* argument) {
    PyObject* result = argument == nullptr ? PyObject_CallNoArgs(function.ptr())
                                           : PyObject_CallOneArg(function.ptr(), argument);
    if (result == nullptr) {
      python_error error;
      error.persist();
      throw error;
    }
    Py_DECREF(result);
  }

  std::shared_ptr<py::function> hold_, prepare_, finish_;  // dropped with the GIL
};

}  // namespace

void init_deferred_sync(py::module_& module) {
  py::class_<DeferredSync, std::shared_ptr<DeferredSync>>(module, "DeferredSync")
      .def(py::init([](py::function hold, py::function prepare, py::function finish) {
             return std::make_shared<PythonStrategy>(std::move(hold), std::move(prepare),
                                                     std::move(finish));
           }),
           py::arg("hold"), py::arg("prepare"), py::arg("finish"));
}

}  // namespace trireme
