#pragma once

#include <trireme/common/export.h>

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>

namespace trireme {

class Communicator;

// A module that averages the gradients of its parameters over ranks (DistributedDataParallel).
// Strategies that average them as well refuse it.
class TRIREME_API AveragesGradients {
 public:
  virtual ~AveragesGradients() = default;
  // Returns the ranks over which it averages; null if it does not tell.
  virtual std::shared_ptr<Communicator> averages_over() { return nullptr; }
};

// Returns the name of the first such module in `module`, "" if that is `module` itself.
inline std::optional<std::string> averaging_module_in(const torch::nn::Module& module) {
  if (dynamic_cast<const AveragesGradients*>(&module) != nullptr) return "";
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (dynamic_cast<const AveragesGradients*>(item.value().get()) != nullptr) return item.key();
  return std::nullopt;
}

}  // namespace trireme
