#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/saving/checkpoint_reader.h>
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
// Python's save_checkpoint and this write the same (python/trireme/_saving/optimizer.py):
//
//   tensors of kind "optimizer"   "<parameter>.<key>": "head.weight.exp_avg", "head.weight.step"
//   optimizer.json                {"param_groups": [{"params": ["head.weight", ...],
//                                                    "lr": 0.001, "betas": [0.9, 0.999], ...}],
//                                  "state": {"head.weight": {"tensors": ["step", "exp_avg", ...],
//                                                            "values": {}}}}
//
// Keys, options and names of parameters are Python's. A rank says what it knows of; `values` are
// states that are no tensors. What counts steps is a tensor of one element in fp32, as in Python,
// or, where fp32 cannot say the number, a value.

// Is a parameter of an optimizer.
struct SteppedParam {
  std::string name;            // in the plain model
  at::Tensor target;           // what this rank steps of it; undefined: nothing
  std::vector<int64_t> sizes;  // sizes of the whole
  const HeldPart* held;        // null: all ranks have all of it
};

// Is an optimizer whose parameters have names.
struct NamedOptimizer {
  torch::optim::Optimizer* shown;     // has the groups that the user sees
  torch::optim::Optimizer* stepping;  // has the states; `shown`, or what that holds
  const OptimizerFields* fields;      // fields of `stepping`
  std::vector<std::vector<SteppedParam>> groups;
  RankOf where;
  // Lists the parameters that optimizers of all ranks have in each group, this one's at first.
  std::vector<std::set<std::string>> names = {};
};

// `names` are of parameters in the plain model, `parts` of what ranks share out, which must live as
// long as the result. Throws ValueError for an optimizer of other parameters and of a class that is
// not known.
NamedOptimizer name_optimizer(torch::optim::Optimizer& optimizer,
                              const std::unordered_map<const at::TensorImpl*, std::string>& names,
                              const HeldParts& parts, RankOf where);

struct OptimizerToSave {
  std::vector<CheckpointTensor> tensors;
  std::string text;  // optimizer.json
};
// Returns this rank's part. Throws ValueError for what Python could not read.
OptimizerToSave optimizer_to_save(const NamedOptimizer& optimizer);

// Is a state on its way from files into an optimizer:
//
//   OptimizerToLoad loaded(optimizer, reader);    // checks all that the text says
//   reader.read(kOptimizerTensors, loaded.counts());
//   loaded.take_counts();
//   reader.read(kOptimizerTensors, loaded.tensors());
//   loaded.put();
//
// Memory that the optimizer has already is read into in place; until then nothing is changed.
class OptimizerToLoad {
 public:
  // Throws ValueError for the state of other parameters, groups or of another class, naming them.
  // `optimizer` must live as long as this.
  OptimizerToLoad(const NamedOptimizer& optimizer, const CheckpointReader& reader);

  const std::vector<CheckpointTensor>& counts() const { return counts_; }
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }
  // Throws ValueError for what is no count.
  void take_counts();
  // Puts states and hyperparameters there; what has no state in the checkpoint has none afterwards.
  void put();

 private:
  using State = std::unique_ptr<torch::optim::OptimizerParamState>;
  class Text;
  void check_groups(const Text& text) const;
  State plan(const SteppedParam& stepped, const torch::optim::OptimizerOptions& options,
             const Text& text, const CheckpointReader& reader);
  void plan_tensor(const SteppedParam& stepped, const StateField& field,
                   const CheckpointTensor& saved);
  at::Tensor memory_for(const SteppedParam& stepped, const StateField& field,
                        at::ScalarType saved) const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  const NamedOptimizer& optimizer_;
  std::shared_ptr<const Text> text_;
  std::vector<std::pair<at::Tensor, State>> states_;  // null: none
  std::vector<CheckpointTensor> counts_;
  std::vector<int64_t*> count_places_;  // in `states_`
  std::vector<CheckpointTensor> tensors_;
};

}  // namespace trireme
