#pragma once

#include <trireme/bindings/bindings.h>

namespace trireme {

// Lets checkpoints use torch's hooks of Python. Called once, when the module is loaded.
void use_python_hooks(pybind11::module_& module);

// Throws what Python's present exception is: StopRecomputation, if a recomputation was stopped by
// one; python_error for any other.
[[noreturn]] void throw_python_error();

}  // namespace trireme
