#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>

namespace trireme {

struct SaveCheckpointOptions {
  // Is the optimizer whose state is saved, over parameters of the module; nothing of it is changed.
  torch::optim::Optimizer* optimizer = nullptr;
  // Is what else to keep, as the text of a JSON object; rank 0's.
  std::string extra = {};
  int64_t max_file_bytes = int64_t{5'000'000'000};
  // Joins the ranks that save together; if null that of a Pipeline, or of the last trireme::init().
  std::shared_ptr<Communicator> communicator = nullptr;
};

struct LoadCheckpointOptions {
  // It has the class and parameter groups of the one that was saved; may be left out.
  torch::optim::Optimizer* optimizer = nullptr;
  // Joins the ranks that load together; if null that of a Pipeline, or of the last trireme::init().
  std::shared_ptr<Communicator> communicator = nullptr;
};

// Keeps the parameters and buffers of a module and the state of its optimizer, in the files that
// Python's save_checkpoint writes and load_checkpoint reads (saving/checkpoint_files.h), under the
// module's own names:
//
//   trireme::save_checkpoint("checkpoint", *net, {.optimizer = &optimizer, .extra = json});
//   std::string extra = trireme::load_checkpoint("checkpoint", *net, {.optimizer = &optimizer});
//
// Modules in `module`, or itself, may be Sharded, and the optimizer a ZeroRedundancyOptimizer: each
// rank writes and reads its parts, nothing is gathered, and any number of ranks, under any
// strategy, loads what another one saved. What is not sharded is the same on all ranks; of buffers
// rank 0's are saved. Units that fewer ranks share (experts) need other names on ranks that have
// other ones. Of a Pipeline each rank saves and loads its stages, with its own optimizer, which has
// the groups of the others'; what several ranks have (tied parameters) is saved once, under its
// first name in the whole module, from the lowest rank that has it. A DistributedDataParallel
// around the module changes no name. What is neither parameter nor buffer is not saved: what a
// module writes in a save() of its own, or a RemoteModule that it has. Without `optimizer`,
// parameters of a ZeroRedundancyOptimizer are loaded while its writing() lives.
//
// The optimizer is Adam, AdamW, SGD, Adagrad or RMSprop of torch::optim, or one derived from these
// such as those of trireme::optim; what Python's class of that name has saved it loads, and the
// other way round. Options that the C++ class does not have (maximize) are refused. A learning
// rate scheduler keeps its counts itself: put them into `extra`.
//
// Collective. What they throw is thrown on all ranks: ValueError for what cannot be saved, for a
// checkpoint that is not whole, or of another module or optimizer (all is then as it was);
// c10::Error where the system refuses. A failed save leaves the previous checkpoint; a disk that
// fails while values are read leaves module and optimizer half loaded.
TRIREME_API void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                                 const SaveCheckpointOptions& options = {});

// Returns the text of `extra`; empty if there is none. Shards may be written until the next forward
// or unshard().
TRIREME_API std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                                        const LoadCheckpointOptions& options = {});

}  // namespace trireme
