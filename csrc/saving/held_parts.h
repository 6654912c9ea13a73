#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
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

// These are what strategies tell saving/ of themselves. Saving asks modules and optimizers by
// dynamic_cast, so that it knows of no strategy, and no strategy of files.

// Holds this rank's part of a parameter that ranks have shared out.
struct HeldPart {
  at::Tensor values;           // in place; without elements where this rank has none
  std::vector<int64_t> sizes;  // sizes of the whole
  std::vector<int64_t> first;  // where the part begins, by dimension
};
using HeldParts = std::unordered_map<const at::TensorImpl*, HeldPart>;

// Is a module or optimizer that shares its parameters out among ranks.
class TRIREME_API HoldsParts {
 public:
  virtual ~HoldsParts() = default;
  // Adds its own, by the tensors among parameters(). Throws ValueError for parts that are no boxes.
  virtual void add_parts(HeldParts& parts) const = 0;
  // Between them each rank may write its parts in place. Collective; end_writing() is left out when
  // abandon_writing() told the other ranks that an exception ended it.
  virtual void begin_writing() = 0;
  virtual void end_writing() {}
  virtual void abandon_writing(const std::string& /*reason*/) noexcept {}
};

// Is an optimizer whose states another one holds, over this rank's parts of its parameters.
class TRIREME_API ShardedOptimizer : public HoldsParts {
 public:
  virtual torch::optim::Optimizer& stepping() = 0;
};

// Is a module of which each rank has other layers (Pipeline).
class TRIREME_API HoldsStages {
 public:
  virtual ~HoldsStages() = default;
  // Says what parameters and buffers of this rank are called in the whole module, by their names
  // here, where that is something else: what stages share has the name of the first.
  virtual const std::unordered_map<std::string, std::string>& names_in_whole() const = 0;
  // Joins all ranks that have stages.
  virtual const std::shared_ptr<Communicator>& stage_ranks() const = 0;
};

// Is a wrapper that is no part of the model (DistributedDataParallel).
class TRIREME_API WrapsModule {
 public:
  virtual ~WrapsModule() = default;
  virtual torch::nn::Module& wrapped() const = 0;
};

// Returns a parameter, or what is shaped like it, as a checkpoint names it. `held` is null for what
// all ranks have alike, of which each writes its rows.
CheckpointTensor part_to_save(const std::string& name, const at::Tensor& values,
                              const HeldPart* held, RankOf where);
// `dtype` is the one it was saved in.
CheckpointTensor part_to_load(const std::string& name, at::ScalarType dtype,
                              const at::Tensor& values, const HeldPart* held);

}  // namespace trireme
