#pragma once

#include <trireme/grad/grad_reducer.h>

namespace torch::nn {
class Module;
}

namespace trireme {

// Parameters of a C++ module, each tensor once under its first name, however often it is
// registered. Those of Embedding and EmbeddingBag with sparse(true) are marked.
TRIREME_API NamedParameters named_parameters(const torch::nn::Module& module);

}  // namespace trireme
