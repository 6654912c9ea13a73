#pragma once

#include <trireme/comm/value.h>

#include <torch/csrc/utils/pybind.h>

#include <string>

// Each function is called with the GIL.
namespace trireme::values {

// Sets the Python class that stands for a Ref: its attribute _ref is a RemoteRef of the module.
void use_ref_type(pybind11::object type);

// Returns a Python object as a value; tensors are not copied and keep their graph. `place` is the
// object's name in errors, "args" or "the result". Throws c10::TypeError naming the place and the
// class of an object that is no value ("args[1]['x'] is a Mine"), and c10::ValueError for an
// integer of more than 64 bits and a text that is not UTF-8.
Value value_of_python(pybind11::handle object, const char* place);
Values values_of_python(const pybind11::tuple& args);
Dict keywords_of_python(const pybind11::dict& kwargs);

pybind11::object python_of(const Value& value);
pybind11::tuple python_of(const Values& values);

}  // namespace trireme::values
