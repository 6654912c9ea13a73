#pragma once

#include <trireme/bindings/bindings.h>

namespace trireme {

// Makes checkpoints use torch's Python hooks. Called once, when the module is loaded.
void use_python_hooks(pybind11::module_& module);

// Clears Python's present exception if it is StopRecomputation; returns whether it was.
bool clear_stop();

}  // namespace trireme
