#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/saving/pending_save.h>

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
  // Whether the call returns at once, and the save goes on beside training; see below.
  bool asynchronous = false;
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
  // Whether all bytes are compared with their checksums before anything is changed. Of a checkpoint
  // without checksums nothing is compared. The same on all ranks.
  bool verify = true;
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
// rank that has it. A DistributedDataParallel around the module changes no name. Of a
// PipeTransformer each rank saves and loads its layers, and what is frozen goes with them. Only
// parameters and buffers are saved: no data that a module's own save() writes, and no RemoteModule.
// Without `optimizer`, parameters of a ZeroRedundancyOptimizer are loaded while its writing()
// lives.
//
// The optimizer is Adam, AdamW, SGD, Adagrad or RMSprop of torch::optim, or one derived from these
// such as those of trireme::optim; it loads the state that Python's class of that name has saved,
// and the other way round. Options that the C++ class does not have (maximize) are refused. A
// learning rate scheduler keeps its counts itself: put them into `extra`.
//
// Collective. Errors are thrown on all ranks: ValueError for content that cannot be saved, for an
// incomplete checkpoint, for one whose bytes are not those that were saved, or for one of another
// module or optimizer (nothing is changed then); c10::Error for errors of the system. A failed save
// leaves the previous checkpoint; a disk that fails while values are read leaves module and
// optimizer half loaded.
//
// With `asynchronous` the call notes what is to be saved, copies buffers, and returns; a thread
// writes the rest from the memory of the parameters and states while the next steps run. What is
// saved is the moment of the call. A write that comes before that is finished has what was not
// written yet copied first: steps by trireme::step(), by the optimizers of trireme::optim and by
// ZeroRedundancyOptimizer, writing(), load_checkpoint(). A write of another kind (a step of a
// torch::optim optimizer by its own step(), p.mul_()) is found, and the save fails, naming the
// tensor; one through set_data() or .data() is not. wait() of the result returns when the
// checkpoint is durable, and throws what a synchronous save throws. One save is in flight: the next
// one waits for it, and throws its error if nobody has fetched it. Context::shutdown() and the end
// of the program wait, too. Where the group can make no second communicator the save is
// synchronous, which is said once.
TRIREME_API PendingSave save_checkpoint(const std::string& path, const torch::nn::Module& module,
                                        const SaveCheckpointOptions& options = {});

// Returns the text of `extra`; empty if there is none. Shards may be written until the next forward
// or unshard().
TRIREME_API std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                                        const LoadCheckpointOptions& options = {});

}  // namespace trireme
