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

// One field of an optimizer's state of a parameter, in place, by its name in Python.
struct StateField {
  const char* name;
  // An undefined tensor stands for a field that Python leaves out; a count is in Python a tensor of
  // one element in fp32.
  std::variant<at::Tensor*, int64_t*> value;
  bool is_needed = true;  // needed by step()
};

// A hyperparameter of a group, in place.
struct OptionField {
  const char* name;
  std::variant<double*, bool*, std::tuple<double, double>*> value;
};

// The options and states of a class of torch::optim, or of a derived one with the same states.
class OptimizerFields {
 public:
  virtual ~OptimizerFields() = default;

  virtual std::vector<OptionField> options(torch::optim::OptimizerOptions& options) const = 0;
  // Returns the options that only Python's class has, with the values that this class implies.
  virtual std::vector<std::pair<const char*, bool>> fixed_options() const = 0;

  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;
  // Returns whether make_state() makes states of this class, which state() takes.
  virtual bool keeps(const torch::optim::OptimizerParamState& state) const = 0;
  virtual std::vector<StateField> state(torch::optim::OptimizerParamState& state,
                                        const torch::optim::OptimizerOptions& options) const = 0;
  // Returns whether step() needs a state of every parameter, and does not make it itself.
  virtual bool needs_states() const { return false; }
};

// Returns null for unknown classes: LBFGS, whose state belongs to all parameters together, and
// users' classes.
const OptimizerFields* fields_of(const torch::optim::Optimizer& optimizer);

}  // namespace trireme
