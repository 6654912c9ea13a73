#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <unordered_map>

namespace trireme {

// The tensors that stand in place of a module's parameters.
using Replacements = std::unordered_map<const at::TensorImpl*, at::Tensor>;

// Registers in `target` what is registered in `source`, with replacements for its parameters, the
// same buffers, and modules without a forward in place of its children. Units among the children
// are registered themselves. See [Note: a sharded C++ module] in sharded_module.h.
void fill_mirror(torch::nn::Module& target, const torch::nn::Module& source,
                 const Replacements& replacements);

}  // namespace trireme
