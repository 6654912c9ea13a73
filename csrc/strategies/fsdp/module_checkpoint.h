#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>

namespace trireme {

struct ModuleCheckpointOptions {
  // What else to keep, as the text of a JSON object; rank 0's.
  std::string extra = {};
  int64_t max_file_bytes = int64_t{5'000'000'000};
  // Of the ranks that save or load together; that of the last trireme::init() if null.
  std::shared_ptr<Communicator> communicator = nullptr;
};

// The parameters and buffers of a module in the files that Python's save_checkpoint writes and
// load_checkpoint reads (saving/checkpoint_files.h), under the module's own names:
//
//   trireme::save_checkpoint("checkpoint", *net);
//   trireme::load_checkpoint("checkpoint", *net);
//
// Modules in `module`, or itself, may be Sharded: each rank writes and reads its shards, nothing is
// gathered, and any number of ranks loads what another one saved. What is not sharded is the same
// on all ranks; of buffers rank 0's are saved. Units that fewer ranks share (experts) need other
// names on ranks that have other ones. Under DistributedDataParallel pass the module inside; under
// ZeroRedundancyOptimizer load while its writing() lives. Optimizers are not saved here.
//
// Collective. What they throw is thrown on all ranks: ValueError for what cannot be saved, for a
// checkpoint that is not whole, or of another module (which is then as it was); c10::Error where
// the system refuses. A failed save leaves the previous checkpoint.
TRIREME_API void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                                 const ModuleCheckpointOptions& options = {});

// Returns the text of `extra`; empty if there is none. Shards may be written until the next forward
// or unshard().
TRIREME_API std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                                        std::shared_ptr<Communicator> communicator = nullptr);

}  // namespace trireme
