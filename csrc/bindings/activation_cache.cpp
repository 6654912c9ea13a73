#include <trireme/activation/activation_cache.h>

#include <trireme/activation/prefix_cache.h>
#include <trireme/bindings/bindings.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// Reads what a module and those in it have out of their dicts, which runs no Python code.
class ModuleWalk {
 public:
  // `same`: a set of classes, whose modules do the same in training and in evaluation mode.
  explicit ModuleWalk(PyObject* same) : same_(same) {}

  // Returns whether all of it could be read: some modules, such as those of TorchScript, have other
  // mappings in place of dicts.
  bool read(PyObject* module) {
    static PyObject* const training = PyUnicode_InternFromString("training");
    static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
    static PyObject* const buffers = PyUnicode_InternFromString("_buffers");
    static PyObject* const modules = PyUnicode_InternFromString("_modules");
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) throw py::error_already_set();
    if (PyDict_GetItemWithError(attributes.ptr(), training) != Py_False)
      has_mode_ = has_mode_ || !is_same(module);
    PyObject* const children = PyDict_GetItemWithError(attributes.ptr(), modules);
    return add(PyDict_GetItemWithError(attributes.ptr(), parameters), true) &&
           add(PyDict_GetItemWithError(attributes.ptr(), buffers), false) && is_dict(children) &&
           read_each(children);
  }

  // Returns whether a module that may depend on the training mode is in it.
  bool has_mode() const { return has_mode_; }

  // Calls `see` for what was read. No Python code may run in between, which could free it.
  void show(PrefixLayers::See see) const {
    for (const auto& [tensor, is_parameter] : found_) see(THPVariable_Unpack(tensor), is_parameter);
  }

 private:
  static bool is_dict(PyObject* object) { return object != nullptr && PyDict_Check(object) != 0; }

  bool is_same(PyObject* module) const {
    const int is_in = PySet_Contains(same_, reinterpret_cast<PyObject*>(Py_TYPE(module)));
    if (is_in < 0) throw py::error_already_set();
    return is_in == 1;
  }

  bool add(PyObject* tensors, bool is_parameter) {
    if (!is_dict(tensors)) return false;
    Py_ssize_t place = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(tensors, &place, nullptr, &value) != 0)
      if (THPVariable_Check(value)) found_.emplace_back(value, is_parameter);
    return true;
  }

  bool read_each(PyObject* modules) {
    Py_ssize_t place = 0;
    PyObject* module = nullptr;
    while (PyDict_Next(modules, &place, nullptr, &module) != 0)
      if (module != Py_None && !read(module)) return false;
    return true;
  }

  PyObject* same_;
  bool has_mode_ = false;
  std::vector<std::pair<PyObject*, bool>> found_;  // borrowed
};

// The layers of a CachedPrefix in a call, an object of the class _Layers of activation_cache.py.
class PythonLayers final : public PrefixLayers {
 public:
  explicit PythonLayers(const py::object& layers) : layers_(layers) {}

  void look(See see) const override {
    const py::gil_scoped_acquire gil;
    const py::object modules = layers_.attr("modules");
    const py::object same = layers_.attr("same_in_both_modes");
    ModuleWalk walk(same.ptr());
    const bool could_read = walk.read(modules.ptr());
    if (could_read) walk.show(see);
    if (!could_read || walk.has_mode()) layers_.attr("expect_evaluation")();
    if (could_read) return;
    for (const auto& [layer, name, tensor, is_parameter] : named()) see(tensor, is_parameter);
  }

  std::vector<PrefixTensor> tensors() const override {
    const py::gil_scoped_acquire gil;
    std::vector<PrefixTensor> tensors;
    for (auto& [layer, name, tensor, is_parameter] : named())
      tensors.push_back({layer, std::move(name), std::move(tensor)});
    return tensors;
  }

  at::Tensor run(size_t first, const at::Tensor& input) override {
    const py::gil_scoped_acquire gil;
    return layers_.attr("run")(first, input).cast<at::Tensor>();
  }

 private:
  using Named = std::tuple<size_t, std::string, at::Tensor, bool>;
  std::vector<Named> named() const { return layers_.attr("named")().cast<std::vector<Named>>(); }

  const py::object& layers_;  // the caller's, who has it as long as the call lasts
};

}  // namespace

void bind_activation_cache(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  py::class_<CacheStats>(module, "CacheStats")
      .def_readonly("hits", &CacheStats::hits)
      .def_readonly("misses", &CacheStats::misses)
      .def_readonly("bytes", &CacheStats::bytes)
      .def_readonly("depth", &CacheStats::depth)
      .def("__repr__", [](const CacheStats& stats) {
        return c10::str("CacheStats(hits=", stats.hits, ", misses=", stats.misses,
                        ", bytes=", stats.bytes, ", depth=", stats.depth, ")");
      });
  py::class_<ActivationCache, std::shared_ptr<ActivationCache>>(module, "ActivationCache")
      .def(py::init([](int64_t samples, int64_t bytes, std::shared_ptr<Communicator> communicator) {
             const py::gil_scoped_release no_gil;
             return std::make_shared<ActivationCache>(samples, bytes, std::move(communicator));
           }),
           py::arg("samples"), py::arg("bytes"), py::arg("communicator"))
      .def_property_readonly("samples", &ActivationCache::samples)
      .def_property_readonly("entries", &ActivationCache::entries)
      .def_property_readonly("is_off", &ActivationCache::is_off)
      .def("stats", &ActivationCache::stats);
  py::class_<PrefixCache>(module, "PrefixCache")
      .def(py::init([](std::shared_ptr<ActivationCache> cache, std::vector<std::string> layers,
                       bool always) {
             return std::make_unique<PrefixCache>(std::move(cache), std::move(layers), always);
           }),
           py::arg("cache"), py::arg("layers"), py::arg("always"))
      .def("forward",
           wrap_pybind_function_no_gil([](PrefixCache& cache, const at::Tensor& input,
                                          const at::Tensor& ids, const py::object& layers) {
             PythonLayers own(layers);
             return cache.forward(input, ids, own);
           }),
           py::arg("input"), py::arg("ids"), py::arg("layers"));
}

}  // namespace trireme
