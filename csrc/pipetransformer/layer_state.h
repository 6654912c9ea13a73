#pragma once

#include <trireme/common/export.h>
#include <trireme/pipetransformer/move_layers.h>

#include <torch/optim/optimizer.h>

namespace trireme {

// What a torch::optim optimizer keeps of a layer, as named tensors and a text, and back. Its
// parameters have names within the layer: "weight" has the tensors "weight.exp_avg", ..., and in
// the text, a JSON object, what is no tensor: {"weight": {"step": 12}}. A parameter without a state
// is not in the text.

// Throws TypeError for an optimizer whose states are not known (saving/optimizer_fields.h), or lie
// elsewhere (ZeroRedundancyOptimizer).
TRIREME_API void check_layer_states(const torch::optim::Optimizer& optimizer);

// Returns what is kept of `parameters`: tensors in place.
TRIREME_API MovedState layer_state(torch::optim::Optimizer& optimizer,
                                   const NamedTensors& parameters);

// Puts states in the place of those that there are of `parameters`, which the optimizer steps.
TRIREME_API void put_layer_state(torch::optim::Optimizer& optimizer, const NamedTensors& parameters,
                                 const MovedState& state);

// Drops what is kept of `parameters`.
TRIREME_API void forget_layer_state(torch::optim::Optimizer& optimizer,
                                    const NamedTensors& parameters);

}  // namespace trireme
