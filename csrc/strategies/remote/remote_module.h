#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_spec.h>
#include <trireme/strategies/remote/hosted.h>
#include <trireme/strategies/remote/rpc_agent.h>
#include <trireme/strategies/remote/typed_values.h>
#include <trireme/strategies/remote/value.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme::remote {

// A parameter of a remote module.
struct RemoteParameter {
  std::string name = {};
  std::vector<int64_t> sizes = {};
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = true;
};

struct ModuleRequest {
  int64_t to = 0;
  std::string factory = {};
  Values args = {};
  Dict kwargs = {};
  // This caller's optimizer, which steps with this caller's gradients alone.
  std::optional<OptimizerSpec> optimizer = {};
  // The timeout of each call; 30 minutes if absent.
  std::optional<std::chrono::milliseconds> timeout = {};
};

// A module that lives at another rank, or at this one. Its outputs have a graph: backward()
// continues at the owner, where the gradients of parameters stay for this caller's step(), while
// the gradients of inputs come back. Thread-safe. Each function is one call, which throws the
// owner's exception (failures.h), and c10::DistBackendError if the owner is gone or late. torch's
// equivalent is RemoteModule under dist_autograd.context.
class TRIREME_API RemoteModule {
 public:
  // Calls the factory at the owner.
  RemoteModule(std::shared_ptr<RpcAgent> agent, ModuleRequest request);

  // Returns the rank of the owner.
  int64_t owner() const { return session_->address().owner; }

  // Calls the module, with a graph if grad mode is enabled; inputs that require gradients get them.
  // A graph that is dropped without a backward is freed at the owner, too. A graph is used once,
  // and has no graph of its own: a second backward, and create_graph, throw c10::Error.
  Value forward_values(const Values& args, const Dict& kwargs, bool training);
  // Takes types of typed_values.h, in the mode of train() and eval(), which is this caller's own.
  template <typename T = at::Tensor, typename... A>
  T forward(const A&... args) {
    return value_as<T>(forward_values({value_of(args)...}, {}, training_), "the result");
  }
  void train(bool training = true) { training_ = training; }
  void eval() { train(false); }

  // Steps with the gradients of this caller, which stay until zero_grad(). Throws c10::Error
  // without an optimizer.
  void step();
  void zero_grad();
  // Return copies of all parameters and buffers, and of one.
  ModuleBody::Named state();
  at::Tensor fetch(const std::string& name);
  // Writes the given values, by name, and leaves the others. Throws c10::ValueError, and writes
  // nothing, for an unknown name or another shape.
  void load(const ModuleBody::Named& values);
  std::vector<RemoteParameter> parameters();

 private:
  Value call(Verb verb, Values args);

  std::shared_ptr<RpcAgent> agent_;
  std::string factory_;
  std::optional<std::chrono::milliseconds> timeout_;
  RefPtr session_;
  bool training_ = true;
};

}  // namespace trireme::remote
