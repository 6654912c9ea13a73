#include <trireme/grad/write_gate.h>

#include <c10/util/ScopeExit.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace trireme {
namespace {

// The reference keeps a tensor's address from being used again, not the tensor.
struct Guarded {
  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> parameter;
  std::weak_ptr<WriteGate> gate;

  Guarded(const at::Tensor& one, const std::shared_ptr<WriteGate>& its_gate)
      : parameter(one.getIntrusivePtr()), gate(its_gate) {}
};

// One for the process: ranks may be threads.
class Gates {
 public:
  static Gates& instance() {
    static Gates gates;
    return gates;
  }

  void put(const std::vector<at::Tensor>& parameters, const std::shared_ptr<WriteGate>& gate) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(guarded_, [](const auto& item) { return item.second.gate.expired(); });
    for (const at::Tensor& one : parameters)
      guarded_.insert_or_assign(one.unsafeGetTensorImpl(), Guarded(one, gate));
  }

  std::shared_ptr<WriteGate> find(const at::Tensor& parameter) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = guarded_.find(parameter.unsafeGetTensorImpl());
    return found == guarded_.end() ? nullptr : found->second.gate.lock();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Guarded> guarded_;
};

// The optimizer whose gates step() has passed: one of ours would pass them again, and a gate hears
// of each step once.
thread_local const torch::optim::Optimizer* passed = nullptr;

}  // namespace

void put_gate(const std::vector<at::Tensor>& parameters, const std::shared_ptr<WriteGate>& gate) {
  Gates::instance().put(parameters, gate);
}

std::shared_ptr<WriteGate> gate_of(const at::Tensor& parameter) {
  return Gates::instance().find(parameter);
}

void pass_gates(const torch::optim::Optimizer& optimizer) {
  if (passed == &optimizer) return;
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
