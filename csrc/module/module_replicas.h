#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace trireme {

// The tensors of a module and those of its replicas, replica by replica in the same order.
//
// A leaf stands for a parameter (or a buffer that requires a gradient) in a replica: a leaf of
// autograd of its own, which begins the graph of that replica. Where it is on the device of its
// master it is the master's memory under the master's version counter, and takes no memory; a graph
// kept over an optimizer step raises as in one process.
struct ModuleReplicas {
  std::vector<c10::Device> devices = {};  // devices of the replicas
  std::vector<std::string> names = {};    // names of parameters, for messages
  std::vector<at::Tensor> parameters = {};
  std::vector<std::vector<at::Tensor>> leaves = {};  // [replica][parameter]
  std::vector<at::Tensor> buffers = {};
  std::vector<std::vector<at::Tensor>> replica_buffers = {};  // [replica][buffer]
};

// Gives `copy` the memory and the version counter of `master`.
TRIREME_API void share_tensor(const at::Tensor& master, at::Tensor& copy);
// Makes a leaf train as its master does now: gradients of the same dtype, or none.
TRIREME_API void follow_master(const at::Tensor& master, const at::Tensor& leaf);

}  // namespace trireme
