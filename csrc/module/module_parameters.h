#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme {

// All parameters of a module, frozen ones too: they may be unfrozen later.
struct NamedParameters {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse_gradient;
};

// The present state of a module.
struct ModuleNow {
  NamedParameters parameters;
  std::vector<std::string> beside;  // other properties that all ranks must share, one line each
};

// See [Note: a module that changes] in grad/parameter_changes.h.
struct ModuleWatch {
  // Returns nothing while the module has the parameters that it had when the reducer was made, or
  // when adopted() was called last. Called after every forward, when it may miss some changes for a
  // few forwards, and `thoroughly` in a backward where there is reason to, on the threads that run
  // these.
  std::function<std::optional<ModuleNow>(bool thoroughly)> look;
  // Tells the watch that the reducer works with look()'s last result from now on.
  std::function<void()> adopted;
};

// Returns the parameters of a C++ module, each tensor once under its first name, however often it
// is registered. Those of Embedding and EmbeddingBag with sparse(true) are marked.
TRIREME_API NamedParameters named_parameters(const torch::nn::Module& module);

// Returns a watch for GradReducer::watch_module(): whether `module`, kept alive, has other
// parameters than now. A look walks over it, without its names: about 20 ns per parameter.
TRIREME_API ModuleWatch watch_parameters_of(std::shared_ptr<torch::nn::Module> module);

}  // namespace trireme
