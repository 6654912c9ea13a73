#include <trireme/bindings/bindings.h>

#include <algorithm>

namespace trireme {
namespace {

namespace py = pybind11;

// Returns whether a dict holds the same objects under the same keys, in the same order, as an
// earlier copy `before`; if `before` is a number, whether it holds as many. Runs no Python code.
bool is_copy_of(PyObject* dict, PyObject* before) {
  if (PyLong_Check(before) != 0)
    return dict != nullptr && PyDict_Check(dict) != 0 &&
           PyDict_GET_SIZE(dict) == PyLong_AsSsize_t(before);
  if (dict == nullptr || PyDict_Check(dict) == 0 ||
      PyDict_GET_SIZE(dict) != PyDict_GET_SIZE(before))
    return false;
  Py_ssize_t place = 0;
  Py_ssize_t place_before = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  PyObject* key_before = nullptr;
  PyObject* value_before = nullptr;
  while (PyDict_Next(dict, &place, &key, &value) != 0) {
    if (PyDict_Next(before, &place_before, &key_before, &value_before) == 0) return false;
    if (key != key_before || value != value_before) return false;
  }
  return true;
}

// Returns whether the modules [begin, end) still have the same parameters and submodules. `layers`
// is a list of tuples: a module's __dict__, and copies of its dicts _parameters (or the number of
// these) and _modules.
bool has_layers(const py::list& layers, Py_ssize_t begin, Py_ssize_t end) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  static PyObject* const modules = PyUnicode_InternFromString("_modules");
  for (Py_ssize_t i = begin; i < std::min(end, PyList_GET_SIZE(layers.ptr())); ++i) {
    PyObject* layer = PyList_GET_ITEM(layers.ptr(), i);
    PyObject* attributes = PyTuple_GET_ITEM(layer, 0);
    if (!is_copy_of(PyDict_GetItemWithError(attributes, parameters), PyTuple_GET_ITEM(layer, 1)) ||
        !is_copy_of(PyDict_GetItemWithError(attributes, modules), PyTuple_GET_ITEM(layer, 2)))
      return false;
  }
  return true;
}

}  // namespace

void init_layer_watch(py::module_& module) {
  module.def("has_layers", has_layers, py::arg("layers"), py::arg("begin"), py::arg("end"));
}

}  // namespace trireme
