#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_spec.h>
#include <trireme/strategies/remote/hosted.h>
#include <trireme/strategies/remote/ref.h>
#include <trireme/strategies/remote/switchboard.h>
#include <trireme/strategies/remote/typed_values.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme::remote {

// Describes a parameter of a module that is elsewhere.
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
  // Belongs to this caller, and steps with its gradients alone.
  std::optional<OptimizerSpec> optimizer = {};
  // Bounds each call; 30 minutes if there is none.
  std::optional<std::chrono::milliseconds> timeout = {};
};

// Is a module that lives at another rank, or at this one. Its outputs have a graph: backward() goes
// on at the owner, where the gradients of parameters stay for this caller's step(), while those of
// inputs come back. Thread-safe. Each function is one call, which throws what it ended with there
// (failures.h), and c10::DistBackendError where the owner is gone or late. torch's equivalent is
// RemoteModule under dist_autograd.context.
class TRIREME_API RemoteModule {
 public:
  // Calls the factory at the owner.
  RemoteModule(std::shared_ptr<Switchboard> board, ModuleRequest request);

  // Returns the rank of the owner.
  int64_t owner() const { return seat_->address().owner; }

  // With a graph where grad mode is enabled; inputs that require gradients get them. One that is
  // dropped without a backward frees what the owner keeps for it. The graph is used once, and has
  // no graph of its own: a second backward, and create_graph, throw c10::Error.
  Value forward_values(const Values& args, const Dict& kwargs, bool training);
  // Takes types of typed_values.h, in the mode of train() and eval(), which each caller has
  // of its own.
  template <typename T = at::Tensor, typename... A>
  T forward(const A&... args) {
    return value_as<T>(forward_values({value_of(args)...}, {}, training_), "the result");
  }
  void train(bool training = true) { training_ = training; }
  void eval() { train(false); }

  // Applies the gradients of this caller, which stay until zero_grad(). Throws c10::Error without
  // an optimizer.
  void step();
  void zero_grad();
  // Returns copies.
  ModuleBody::Named state();
  at::Tensor fetch(const std::string& name);
  // Writes what it is given, by name, and leaves the rest. Throws c10::ValueError, and writes
  // nothing, for a name that is unknown and another shape.
  void load(const ModuleBody::Named& values);
  std::vector<RemoteParameter> parameters();

 private:
  Value call(Verb verb, Values args);

  std::shared_ptr<Switchboard> board_;
  std::string factory_;
  std::optional<std::chrono::milliseconds> timeout_;
  RefPtr seat_;
  bool training_ = true;
};

}  // namespace trireme::remote
