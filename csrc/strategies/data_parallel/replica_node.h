#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

namespace trireme {

class ReplicaPass;

// Makes `outputs` the results of one autograd node, whose next functions are `next_edges` and whose
// backward is that of `pass`. See [Note: two graphs] in replica_pass.h.
void set_replica_history(const std::vector<at::Tensor>& outputs,
                         torch::autograd::edge_list next_edges, std::shared_ptr<ReplicaPass> pass);

// Returns a tensor with the memory of `leaf` and a history that ends there, for code that writes
// into its inputs, which a leaf forbids.
at::Tensor computed_from(const at::Tensor& leaf);

}  // namespace trireme
