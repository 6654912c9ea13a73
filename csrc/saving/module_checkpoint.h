#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>

namespace trireme {

class HoldsRounds;  // held_rounds.h

struct SaveCheckpointOptions {
  // The optimizer whose state is saved, over parameters of the module; it is not changed.
  torch::optim::Optimizer* optimizer = nullptr;
  // Other data to keep, as the text of a JSON object; rank 0's.
  std::string extra = {};
  int64_t max_file_bytes = int64_t{5'000'000'000};
  // The ranks that save together; null: those of the Pipeline, or of the last trireme::init().
  std::shared_ptr<Communicator> communicator = nullptr;
  // The LocalSGD or DiLoCo that steps the optimizer, which must be given then. Parameters are saved
  // as all workers have agreed on them, and beside them what each worker has, also in mid-round.
  HoldsRounds* rounds = nullptr;
};

struct LoadCheckpointOptions {
  // The optimizer to load into, of the class and parameter groups of the saved one; may be null.
  torch::optim::Optimizer* optimizer = nullptr;
  // The ranks that load together; null: those of the Pipeline, or of the last trireme::init().
  std::shared_ptr<Communicator> communicator = nullptr;
  // Whether of what several ranks need each element is read by one of them, which sends it to the
  // others. For a disk that is slower than the network between the ranks. The same on all ranks.
  bool read_once = false;
  // The LocalSGD or DiLoCo to go on with, before its first step. With as many workers as were saved
  // it goes on bit for bit; with others all begin where workers had agreed, and the state of the
  // optimizer is fresh.
  HoldsRounds* rounds = nullptr;
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
// strategy, loads what another one saved. Parameters that are not sharded must be equal on all
// ranks; of buffers rank 0's are saved. Units that only some ranks share (experts) need other names
// on ranks that have other experts. Of a Pipeline each rank saves and loads its stages, with its
// own optimizer, whose groups are those of the other ranks' optimizers; a tensor that several ranks
// have (tied parameters) is saved once, under its first name in the whole module, by the lowest
// rank that has it. A DistributedDataParallel around the module changes no name. Only parameters
// and buffers are saved: no data that a module's own save() writes, and no RemoteModule. Without
// `optimizer`, parameters of a ZeroRedundancyOptimizer are loaded while its writing() lives.
//
// The optimizer is Adam, AdamW, SGD, Adagrad or RMSprop of torch::optim, or one derived from these
// such as those of trireme::optim; it loads the state that Python's class of that name has saved,
// and the other way round. Options that the C++ class does not have (maximize) are refused. A
// learning rate scheduler keeps its counts itself: put them into `extra`.
//
// Collective. Errors are thrown on all ranks: ValueError for content that cannot be saved, for an
// incomplete checkpoint, or for one of another module or optimizer (nothing is changed then);
// c10::Error for errors of the system. A failed save leaves the previous checkpoint; a disk that
// fails while values are read leaves module and optimizer half loaded.
TRIREME_API void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                                 const SaveCheckpointOptions& options = {});

// Returns the text of `extra`; empty if there is none. Shards may be written until the next forward
// or unshard().
TRIREME_API std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                                        const LoadCheckpointOptions& options = {});

}  // namespace trireme
