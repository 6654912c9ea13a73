#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace trireme {

// Is what an optimizer keeps of a parameter, in place, by the name that it has in Python.
struct StateField {
  const char* name;
  // An undefined tensor stands for what Python leaves out; a count is there a tensor of one element
  // in fp32.
  std::variant<at::Tensor*, int64_t*> value;
  bool is_needed = true;  // a step reads it
};

// Is a hyperparameter of a group, in place.
struct OptionField {
  const char* name;
  std::variant<double*, bool*, std::tuple<double, double>*> value;
};

// Describes a class of torch::optim, or one that is derived from it and keeps the same.
class OptimizerFields {
 public:
  virtual ~OptimizerFields() = default;

  virtual std::vector<OptionField> options(torch::optim::OptimizerOptions& options) const = 0;
  // Returns what is an option of Python's class and is always so in this one, with its value.
  virtual std::vector<std::pair<const char*, bool>> fixed_options() const = 0;

  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;
  // Says whether the two functions around take it.
  virtual bool keeps(const torch::optim::OptimizerParamState& state) const = 0;
  virtual std::vector<StateField> state(torch::optim::OptimizerParamState& state,
                                        const torch::optim::OptimizerOptions& options) const = 0;
  // Says whether step() wants a state for every parameter that it has not made itself.
  virtual bool needs_states() const { return false; }
};

// Returns null for a class that is not known: LBFGS, whose state is that of all parameters
// together, and those of users.
const OptimizerFields* fields_of(const torch::optim::Optimizer& optimizer);

}  // namespace trireme
