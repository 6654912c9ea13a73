#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/kernels/optimizer_step.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace trireme {

// The options of torch's optimizers, by their names, for values that a strategy keeps and steps
// itself: it has no torch::optim::Optimizer, since no rank has all of the state.
struct SgdSpec {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;
};
struct AdamSpec {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};
struct AdamWSpec {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};
struct AdagradSpec {
  double lr = 1e-2;
  double eps = 1e-10;
};
// Adagrad with one sum per row of a table: of the mean of the squares of the row's gradient, as in
// FBGEMM's EXACT_ROWWISE_ADAGRAD.
struct RowwiseAdagradSpec {
  double lr = 1e-2;
  double eps = 1e-10;
};
// An update that adds pushed gradients to the values, without a learning rate.
struct SumSpec {};

using OptimizerSpec =
    std::variant<SgdSpec, AdamSpec, AdamWSpec, AdagradSpec, RowwiseAdagradSpec, SumSpec>;

// Returns as many digits as tell two numbers apart.
TRIREME_API std::string digits_of(double value);
// Returns what is wrong with the options, as "got Adam(lr=-1, ...) with lr < 0, expected ...";
// empty if nothing is.
TRIREME_API std::string complaint_about(const OptimizerSpec& spec);
// Returns "SGD(lr=0.1, momentum=0.9, weight_decay=0)". Specs are equal if their texts are.
TRIREME_API std::string to_string(const OptimizerSpec& spec);
// Returns "SGD", and its options in their order.
TRIREME_API std::string name_of(const OptimizerSpec& spec);
TRIREME_API std::vector<double> options_of(const OptimizerSpec& spec);
// Makes a spec; nothing for another name, or another number of options.
TRIREME_API std::optional<OptimizerSpec> optimizer_spec_of(std::string_view name,
                                                           const std::vector<double>& options);
// Returns the learning rate; 1 for a sum, which has none.
TRIREME_API double learning_rate_of(const OptimizerSpec& spec);
TRIREME_API bool has_learning_rate(const OptimizerSpec& spec);
// Returns the number of states: 0, 1 or 2.
TRIREME_API int64_t count_states(const OptimizerSpec& spec);
// Returns the names of the states in torch: "momentum_buffer", "exp_avg", "exp_avg_sq", "sum".
TRIREME_API std::vector<std::string> names_of_states(const OptimizerSpec& spec);
// Returns whether values are stepped row by row: a state has one element per row then, else as many
// as the values.
TRIREME_API bool is_rowwise(const OptimizerSpec& spec);
// Sets the states of a segment; `state_at(i)` returns the memory of state i.
template <typename StateAt>
void set_states(OptimizerSegment& segment, const OptimizerSpec& spec, const StateAt& state_at) {
  const int64_t states = count_states(spec);
  if (std::holds_alternative<AdagradSpec>(spec) || is_rowwise(spec)) {
    segment.exp_avg_sq = state_at(0);
  } else {
    if (states > 0) segment.exp_avg = state_at(0);
    if (states > 1) segment.exp_avg_sq = state_at(1);
  }
}

// One step of adjacent elements.
struct SpecStep {
  double lr = 0;      // in place of the spec's
  int64_t step = 1;   // counts from 1
  double factor = 1;  // multiplies the gradient
};

// Steps one segment on the calling thread, as adam_segment() and its kin do. States of the segment:
// exp_avg, exp_avg_sq for Adam and AdamW; exp_avg for SGD with momentum; exp_avg_sq for Adagrad;
// for RowwiseAdagrad the segment is a row, and exp_avg_sq one element.
TRIREME_API void step_segment(const OptimizerSpec& spec, const OptimizerSegment& segment,
                              SegmentDtypes dtypes, const SpecStep& step);

}  // namespace trireme
