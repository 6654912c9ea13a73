#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/hosted.h>
#include <trireme/strategies/remote/module_step.h>
#include <trireme/strategies/remote/owned_module.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace trireme::remote {

// [Note: steps beside graphs]
//
// A graph keeps the parameters that its forward used. A step of one caller must not disturb the
// graph of another. So, while any graph of the module is in flight, a step writes its result to
// fresh memory and moves the parameter there. A saved leaf would follow it, since autograd saves a
// leaf as itself. So in a forward autograd saves an alias of each parameter in its place, which
// keeps the old memory.

// The owner's state of one caller's module: the graphs of its forwards, its gradients, the states
// of its optimizer. It is freed with the caller, or with the caller's module.
class TRIREME_API RemoteModuleSession final : public Hosted {
 public:
  RemoteModuleSession(std::shared_ptr<OwnedModule> module, std::optional<OptimizerSpec> optimizer)
      : module_(std::move(module)), optimizer_(std::move(optimizer)) {}

  // Performs a call, whose form is described at the functions below. Throws what the module throws,
  // and c10::ValueError for a call of another form.
  Value serve(Verb verb, CallMessage& call, const OwnedModule::Use::Wait& wait);
  // Returns the graph of a forward and forgets it. Destroying the graph may run user code.
  std::shared_ptr<void> drop(int64_t forward);

 private:
  struct Graph;

  // Takes training, whether a graph is wanted, the numbers of the argument tensors that want a
  // gradient, arguments, keyword arguments, and autocast. Returns the number of the forward (-1
  // without a graph), the result, and the numbers of the result's tensors that require grad.
  Value forward(CallMessage& call, const OwnedModule::Use::Wait& wait);
  // Takes the number of the forward, gradients of these tensors, and autocast. Returns gradients of
  // the inputs that want one.
  Value backward(const CallMessage& call);
  void step(const OwnedModule::Use::Wait& wait);
  // Takes the name of one parameter or buffer, or None for all. Returns a Dict of copies.
  Value state(const CallMessage& call, const OwnedModule::Use::Wait& wait);
  // Takes a Dict of tensors.
  void load(const CallMessage& call, const OwnedModule::Use::Wait& wait);
  // Returns name, sizes, dtype and requires_grad of each parameter.
  Value parameters();

  std::shared_ptr<OwnedModule> module_;
  std::optional<OptimizerSpec> optimizer_;
  std::mutex mutex_;  // guards all that follows
  std::unordered_map<int64_t, std::shared_ptr<Graph>> graphs_;
  int64_t next_ = 0;
  std::map<std::string, at::Tensor> gradients_;  // keyed by parameter
  std::map<std::string, StepState> states_;
};

}  // namespace trireme::remote
