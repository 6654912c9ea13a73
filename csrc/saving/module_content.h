#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_source.h>
#include <trireme/saving/held_checkpoint.h>
#include <trireme/saving/held_parts.h>
#include <trireme/saving/trained_module.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace trireme {

// Returns a module without the wrappers that are no part of the model.
const torch::nn::Module& plain_module(const torch::nn::Module& module);

// Returns this rank's parts of what modules in `module`, itself included, or the optimizer, which
// may be null, have sharded.
HeldParts held_parts_in(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer);
// Calls `write` in a phase in which this rank may write its parts: those of the outermost modules
// that hold parts, and of the optimizer. Collective over the ranks that share these.
void write_held_parts(const TrainedModule& trained, const std::function<void()>& write);

// Returns the ranks that save or load `module`: those of `communicator`; if that is null, those of
// its stages, or of the last trireme::init(). Throws ValueError if these lack ranks of its stages.
CheckpointRanks ranks_of(std::shared_ptr<Communicator> communicator,
                         const torch::nn::Module& module);

// What becomes of tensors that a forward or a backward writes (buffers, states of codes), or
// another rank's step: they are listed as they lie, or as copies.
enum class WrittenBeside : uint8_t { kInPlace, kCopied };

// Returns what this rank writes; throws ValueError for a module or optimizer that cannot be saved.
// check_of_stages() comes before.
CheckpointContent content_of_rank(const TrainedModule& trained, RankOf where,
                                  WrittenBeside written);
// The same on all ranks: collective, throws on all of them.
CheckpointContent content_to_save(const TrainedModule& trained, const CheckpointRanks& ranks);

// Returns the parameters whose announced writes are writes of what this rank saves; see
// memory/snapshot.h.
std::vector<at::Tensor> written_with(const TrainedModule& trained);

// Returns the collective check of a module of which each rank has other stages: all ranks that
// train have an optimizer, or none has. Empty for other modules.
std::function<void(const CheckpointRanks&)> check_of_stages(const TrainedModule& trained);

// Returns all that this rank holds; nothing without a module. Collective; throws what
// content_to_save() does.
HeldContent content_held(const TrainedModule& trained, const CheckpointRanks& ranks);

// Whether all ranks have the module to load into.
enum class LoadedOn : uint8_t { kAllRanks, kSomeRanks };

// Loads into this rank's parts. Collective; throws what load_checkpoint() does.
void load_content(const CheckpointSource& source, const TrainedModule& trained, LoadedOn loaded_on,
                  const CheckpointRanks& ranks);

}  // namespace trireme
