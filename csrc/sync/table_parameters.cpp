#include <trireme/sync/table_parameters.h>

#include <trireme/memory/tensor_registry.h>

namespace trireme {
namespace {

// There is one for the process: ranks may be threads.
TensorRegistry<ParameterTable>& tables() {
  static TensorRegistry<ParameterTable> tables;
  return tables;
}

}  // namespace

void put_table(const std::vector<at::Tensor>& parameters,
               const std::shared_ptr<ParameterTable>& table) {
  tables().put(parameters, table);
}

std::shared_ptr<ParameterTable> table_of(const at::Tensor& parameter) {
  return tables().find(parameter);
}

}  // namespace trireme
