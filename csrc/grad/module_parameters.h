#pragma once

#include <trireme/grad/grad_reducer.h>

#include <memory>

namespace torch::nn {
class Module;
}

namespace trireme {

// Parameters of a C++ module, each tensor once under its first name, however often it is
// registered. Those of Embedding and EmbeddingBag with sparse(true) are marked.
TRIREME_API NamedParameters named_parameters(const torch::nn::Module& module);

// For GradReducer::watch_module(): tells when `module`, which it keeps alive, has other parameters
// than now. A look walks over the module, without its names: about 20 ns per parameter.
TRIREME_API ModuleWatch watch_parameters_of(std::shared_ptr<torch::nn::Module> module);

}  // namespace trireme
