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
// graph of another, so that, while any graph of the module is in flight, a step writes its result
// to fresh memory and lets the parameter have that. What autograd saved of a parameter would follow
// it there: a leaf is saved as itself. So a forward has autograd save an alias of each parameter in
// its place, which keeps the old memory.

// Is what one caller's module has at the owner: the graphs of its forwards, its gradients, the
// states of its optimizer. It goes with the caller, or with the caller's module.
class TRIREME_API ModuleSeat final : public Hosted {
 public:
  ModuleSeat(std::shared_ptr<OwnedModule> module, std::optional<OptimizerSpec> optimizer)
      : module_(std::move(module)), optimizer_(std::move(optimizer)) {}

  // Does what a call asks for; its form is described beside the functions below. Throws what the
  // module throws, and c10::ValueError for a call of another form.
  Value serve(Verb verb, CallMessage& call, const OwnedModule::Use::Wait& wait);
  // Forgets the graph of a forward. What it returns may run code of the user's when it goes.
  std::shared_ptr<void> drop(int64_t forward);

 private:
  struct Graph;

  // Takes training, whether a graph is wanted, the numbers of those tensors among the arguments
  // that want a gradient, arguments, keyword arguments, and autocast. Returns the number of the
  // forward (-1 without a graph), the result, and the numbers of those of its tensors that have a
  // gradient.
  Value forward(CallMessage& call, const OwnedModule::Use::Wait& wait);
  // Takes the number of the forward, gradients of these tensors, and autocast. Returns gradients of
  // those inputs that want one.
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
