#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint_source.h>
#include <trireme/saving/held_parts.h>
#include <trireme/saving/optimizer_fields.h>

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

// [Note: the state of an optimizer in a checkpoint]
//
// Python's save_checkpoint writes the same (python/trireme/_saving/optimizer.py):
//
//   tensors of kind "optimizer"   "<parameter>.<key>": "head.weight.exp_avg", "head.weight.step"
//   optimizer.json                {"param_groups": [{"params": ["head.weight", ...],
//                                                    "lr": 0.001, "betas": [0.9, 0.999], ...}],
//                                  "state": {"head.weight": {"tensors": ["step", "exp_avg", ...],
//                                                            "values": {}}}}
//
// Keys, options and names of parameters are Python's. A rank's text has the parameters that it
// knows; `values` are states that are no tensors. A count of steps is a tensor of one element in
// fp32, as in Python, or a value if it is too large for fp32.

// A parameter of an optimizer.
struct SteppedParam {
  std::string name;            // in the plain model
  at::Tensor target;           // this rank's part, which it steps; undefined: none
  std::vector<int64_t> sizes;  // sizes of the whole
  const HeldPart* held;        // null: all ranks have it in full
};

// An optimizer whose parameters have names.
struct NamedOptimizer {
  torch::optim::Optimizer* shown;     // its groups are the user's
  torch::optim::Optimizer* stepping;  // has the states; `shown` or its inner optimizer
  const OptimizerFields* fields;      // fields of `stepping`
  std::vector<std::vector<SteppedParam>> groups;
  RankOf where;
  // The parameters in each group of all ranks' optimizers; at first only this rank's.
  std::vector<std::set<std::string>> names = {};
};

// Names an optimizer's parameters by `names`, those of the plain model. `parts` are those of
// sharded parameters and must outlive the result. Throws ValueError for an optimizer of other
// parameters or of an unknown class.
NamedOptimizer name_optimizer(torch::optim::Optimizer& optimizer,
                              const std::unordered_map<const at::TensorImpl*, std::string>& names,
                              const HeldParts& parts, RankOf where);

struct OptimizerToSave {
  std::vector<CheckpointTensor> tensors;
  std::string text;  // optimizer.json
};
// Returns this rank's part of a state; of tensors that all ranks have the rows that torch.chunk
// gives to `rows`: {0, 1} is all of them. Throws ValueError for a state that Python cannot read.
OptimizerToSave optimizer_to_save(const NamedOptimizer& optimizer, RankOf rows);

// An optimizer's state while it is loaded:
//
//   OptimizerToLoad loaded(optimizer, source);    // checks all that the text says
//   source.read(kOptimizerTensors, loaded.counts());
//   loaded.take_counts();
//   source.read(kOptimizerTensors, loaded.tensors());
//   loaded.put();
//
// Reads in place into memory that the optimizer has already; before that nothing is changed.
class OptimizerToLoad {
 public:
  // Throws ValueError for the state of other parameters or groups, or of another class, naming
  // them. `optimizer` must outlive this.
  OptimizerToLoad(const NamedOptimizer& optimizer, const CheckpointSource& source);

  const std::vector<CheckpointTensor>& counts() const { return counts_; }
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }
  // Stores the counts that were read. Throws ValueError for a value that is no count.
  void take_counts();
  // Puts states and hyperparameters into the optimizer. States that were not saved are removed.
  void put();

 private:
  using State = std::unique_ptr<torch::optim::OptimizerParamState>;
  class Text;
  void check_groups(const Text& text) const;
  State plan(const SteppedParam& stepped, const torch::optim::OptimizerOptions& options,
             const Text& text, const CheckpointSource& source);
  void plan_tensor(const SteppedParam& stepped, const StateField& field,
                   const CheckpointTensor& saved);
  at::Tensor memory_for(const SteppedParam& stepped, const StateField& field,
                        at::ScalarType saved) const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  const NamedOptimizer& optimizer_;
  std::shared_ptr<const Text> text_;
  std::vector<std::pair<at::Tensor, State>> states_;  // null: no state
  std::vector<CheckpointTensor> counts_;
  std::vector<int64_t*> count_places_;  // in `states_`
  std::vector<CheckpointTensor> tensors_;
};

}  // namespace trireme
