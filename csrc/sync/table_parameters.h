#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// A table of a server that is made of a module: it takes the gradients of these parameters from
// .grad, and steps them. Whoever would do so as well, or keeps gradients elsewhere, refuses them.
struct ParameterTable {
  std::string name;
};

// Registers the table of these parameters, as long as it lives. Keeps neither of them alive.
// Thread-safe.
TRIREME_API void put_table(const std::vector<at::Tensor>& parameters,
                           const std::shared_ptr<ParameterTable>& table);
// Returns the living table of a parameter, or null. Thread-safe.
TRIREME_API std::shared_ptr<ParameterTable> table_of(const at::Tensor& parameter);

}  // namespace trireme
