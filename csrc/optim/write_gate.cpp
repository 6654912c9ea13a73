#include <trireme/optim/write_gate.h>

#include <trireme/memory/snapshot.h>
#include <trireme/memory/tensor_registry.h>

#include <c10/util/ScopeExit.h>

#include <utility>

namespace trireme {
namespace {

// There is one for the process: ranks may be threads.
TensorRegistry<WriteGate>& gates() {
  static TensorRegistry<WriteGate> gates;
  return gates;
}

// The optimizer whose gates step() has passed: one of ours would pass them again, and a gate must
// see each step once.
thread_local const torch::optim::Optimizer* passed = nullptr;

}  // namespace

void put_gate(const std::vector<at::Tensor>& parameters, const std::shared_ptr<WriteGate>& gate) {
  gates().put(parameters, gate);
}

std::shared_ptr<WriteGate> gate_of(const at::Tensor& parameter) { return gates().find(parameter); }

void pass_gates(const torch::optim::Optimizer& optimizer) {
  if (passed == &optimizer) return;
  if (has_snapshots())
    for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups())
      keep_snapshots_of(group.params());
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      if (const auto gate = gate_of(parameter)) gate->before_write(parameter);
}

at::Tensor step(torch::optim::Optimizer& optimizer, torch::optim::Optimizer::LossClosure closure) {
  const auto before = passed;
  const auto restore = c10::make_scope_exit([before] { passed = before; });
  const auto pass = [&optimizer] {
    pass_gates(optimizer);
    passed = &optimizer;
  };
  if (closure == nullptr) {
    pass();
    return optimizer.step();
  }
  return optimizer.step([&] {
    passed = nullptr;  // LBFGS calls it several times
    at::Tensor loss = closure();
    pass();  // what a closure reads, the optimizer writes afterwards
    return loss;
  });
}

}  // namespace trireme
