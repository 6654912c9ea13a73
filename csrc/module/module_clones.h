#pragma once

#include <trireme/common/export.h>
#include <trireme/module/module_replicas.h>

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

namespace trireme {

// Clones of a C++ module.
//
// A clone computes with members of its own (net->head->weight), so its parameters stay the tensors
// that clone() has made; ReplicaTensors or connect() later set their memory and their graph. A
// parameter that is registered twice has a leaf for each place where the clone has a tensor of its
// own.
struct ModuleClones {
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};  // one per device
  ModuleReplicas tensors = {};  // leaves: parameters, and buffers that require a gradient
  // Each module in the original, before those in it, and its twin in each clone.
  using Twins = std::pair<std::shared_ptr<const torch::nn::Module>,
                          std::vector<std::shared_ptr<torch::nn::Module>>>;
  std::vector<Twins> twins = {};
};

// Makes one clone per device, with the values of `module`; the random numbers that constructors
// draw are put back. `module` is held by a shared_ptr. An inner module that cannot be cloned
// becomes the one that reset() makes. Throws NotImplementedError for a `module` that cannot be
// cloned and ValueError for one whose clone is not like it. Cost: the module's memory once per
// clone, and a second time while one is made.
TRIREME_API ModuleClones clone_module(const torch::nn::Module& module,
                                      const std::vector<c10::Device>& devices);

// Brings train() and eval() of the modules in the original to the clones.
TRIREME_API void follow_training(const ModuleClones& clones);

// Makes the leaves of the clones results of the original's parameters: the same memory if that is
// on their device, and the caller's graph, if gradients are recorded. Clone 0 has the original's
// buffers if they are on its device, so that its forward's writes to them stay.
TRIREME_API void connect(ModuleClones& clones);

}  // namespace trireme
