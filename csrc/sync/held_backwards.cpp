#include <trireme/sync/held_backwards.h>

#include <trireme/memory/tensor_registry.h>

namespace trireme {
namespace {

// There is one for the process: ranks may be threads.
TensorRegistry<HeldBackwards>& strategies() {
  static TensorRegistry<HeldBackwards> strategies;
  return strategies;
}

}  // namespace

void put_held_backwards(const std::vector<at::Tensor>& parameters,
                        const std::shared_ptr<HeldBackwards>& strategy) {
  strategies().put(parameters, strategy);
}

std::shared_ptr<HeldBackwards> held_backwards_of(const at::Tensor& parameter) {
  return strategies().find(parameter);
}

}  // namespace trireme
