#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <vector>

namespace trireme {

// What each layer of a Sequential takes, in seconds.
struct LayerSeconds {
  std::vector<double> forward = {};
  std::vector<double> backward = {};
};

// Runs each layer on what the one before returned, a micro-batch: medians of five runs after a
// first one; a backward computes the gradients of inputs and parameters. Layers take and return one
// tensor. Buffers, .grad and random generators are as before afterwards.
TRIREME_API LayerSeconds measure_layers(torch::nn::Sequential layers, const at::Tensor& sample);

}  // namespace trireme
