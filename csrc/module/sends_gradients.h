#pragma once

#include <trireme/common/export.h>

#include <torch/nn/module.h>

#include <algorithm>

namespace trireme {

// A module, or a node of a graph, whose backward passes gradients to another place than .grad of
// its parameters: to a table of a server, or to the owner of a remote module. Code that divides,
// unscales or clips .grad after a backward does not reach these. Python's modules say so by an
// attribute `sends_gradients`.
class TRIREME_API SendsGradients {
 public:
  virtual ~SendsGradients() = default;
};

// Returns whether a module, or one in it, sends gradients.
inline bool sends_gradients(const torch::nn::Module& module) {
  const auto all = module.modules();
  return std::any_of(all.begin(), all.end(), [](const auto& one) {
    return dynamic_cast<const SendsGradients*>(one.get()) != nullptr;
  });
}

}  // namespace trireme
