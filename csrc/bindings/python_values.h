#pragma once

#include <trireme/comm/value.h>
#include <trireme/comm/value_check.h>

#include <torch/csrc/utils/pybind.h>

// Each function is called with the GIL.
namespace trireme::values {

// Sets the Python class that stands for a Ref: its attribute _ref is a RemoteRef of the module.
void use_ref_type(pybind11::object type);

// Return Python objects as values; tensors are not copied and keep their graph. `origin` is what
// errors call the object: "args", "the result". Throw c10::TypeError naming the place and the class
// of an object that is no value ("args[1]['x'] is a Mine"), and c10::ValueError for a text that is
// not UTF-8 and for containers that are nested too deep.
Value value_of_python(pybind11::handle object, const ValueOrigin& origin);
Values values_of_python(const pybind11::tuple& args, const ValueOrigin& origin);
Dict keywords_of_python(const pybind11::dict& kwargs, const ValueOrigin& origin);

pybind11::object python_of(const Value& value);
pybind11::tuple python_of(const Values& values);

}  // namespace trireme::values
