#include <trireme/sync/deferred_sync.h>

#include <trireme/memory/tensor_registry.h>

namespace trireme {
namespace {

// There is one for the process: ranks may be threads.
TensorRegistry<DeferredSync>& strategies() {
  static TensorRegistry<DeferredSync> strategies;
  return strategies;
}

}  // namespace

void put_deferred_sync(const std::vector<at::Tensor>& parameters,
                       const std::shared_ptr<DeferredSync>& strategy) {
  strategies().put(parameters, strategy);
}

std::shared_ptr<DeferredSync> deferred_sync_of(const at::Tensor& parameter) {
  return strategies().find(parameter);
}

}  // namespace trireme
