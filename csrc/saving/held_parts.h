#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/saving/checkpoint.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace trireme {

// The interfaces by which strategies describe themselves to saving/. Saving asks modules and
// optimizers by dynamic_cast, so that it knows no strategy, and no strategy knows files.

// This rank's part of a sharded parameter.
struct HeldPart {
  at::Tensor values;           // in place; without elements where this rank has none
  std::vector<int64_t> sizes;  // sizes of the whole
  std::vector<int64_t> first;  // where the part begins, by dimension
};
using HeldParts = std::unordered_map<const at::TensorImpl*, HeldPart>;

// A module or optimizer that shards its parameters over ranks.
class TRIREME_API HoldsParts {
 public:
  virtual ~HoldsParts() = default;
  // Adds its parts, by the tensors in parameters(). Throws ValueError for parts that are no boxes.
  virtual void add_parts(HeldParts& parts) const = 0;
  // Begin and end a phase in which each rank may write its parts in place. Collective; after an
  // exception abandon_writing(), which informs the other ranks, takes the place of end_writing().
  virtual void begin_writing() = 0;
  virtual void end_writing() {}
  virtual void abandon_writing(const std::string& /*reason*/) noexcept {}
};

// An optimizer whose states are in an inner optimizer over this rank's parts of its parameters.
class TRIREME_API ShardedOptimizer : public HoldsParts {
 public:
  virtual torch::optim::Optimizer& stepping() = 0;
};

// A module of which each rank has other layers (Pipeline).
class TRIREME_API HoldsStages {
 public:
  virtual ~HoldsStages() = default;
  // Maps this rank's names of parameters and buffers to their names in the whole module, where
  // these differ: a tensor that stages share has its name in the first of them.
  virtual const std::unordered_map<std::string, std::string>& names_in_whole() const = 0;
  // Returns the communicator of all ranks that have stages.
  virtual const std::shared_ptr<Communicator>& stage_ranks() const = 0;
};

// A module that freezes its layers itself, and goes on with that from a checkpoint
// (PipeTransformer).
class TRIREME_API FreezesLayers {
 public:
  virtual ~FreezesLayers() = default;
  // Returns how many layers freeze, how many are frozen, then the history of that: int64, the same
  // on all ranks; undefined where nothing freezes.
  virtual at::Tensor frozen_numbers() const = 0;
  // Freezes as many layers as such numbers say, on all ranks. Collective.
  virtual void load_frozen_numbers(const at::Tensor& numbers) = 0;
};

// A module or optimizer whose gradients are coded, which keeps what codes leave out.
class TRIREME_API HoldsCodes {
 public:
  virtual ~HoldsCodes() = default;
  // Returns its coders, on all ranks alike, with the names of the plain module's parameters; none
  // where nothing is compressed.
  virtual std::vector<KeptCodes> kept_codes() const = 0;
};

// A wrapper that is no part of the model (DistributedDataParallel).
class TRIREME_API WrapsModule {
 public:
  virtual ~WrapsModule() = default;
  virtual torch::nn::Module& wrapped() const = 0;
};

// Returns the checkpoint tensor of a parameter, or of a state of its shape. `held` is null for
// tensors that all ranks have in full, of which each writes its rows.
CheckpointTensor part_to_save(const std::string& name, const at::Tensor& values,
                              const HeldPart* held, RankOf where);
// The same for loading; `dtype` is the one in the checkpoint.
CheckpointTensor part_to_load(const std::string& name, at::ScalarType dtype,
                              const at::Tensor& values, const HeldPart* held);

}  // namespace trireme
