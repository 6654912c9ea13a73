#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace trireme {

// Returns a callback that any thread may drop: the last owner takes the GIL for it. Making and
// calling it needs the GIL.
inline std::shared_ptr<pybind11::function> shared_function(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* last) {
            const pybind11::gil_scoped_acquire gil;
            delete last;
          }};
}

}  // namespace trireme
