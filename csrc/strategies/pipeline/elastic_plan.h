#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: fewer ranks for fewer layers]
//
// As layers freeze from the input on, what is left to compute fits into fewer ranks. A pipeline of
// K ranks is then packed into K/2, and the ranks set free run a replica of it (AutoPipe and AutoDP
// of PipeTransformer, He et al., ICML 2021):
//
//   12 layers on 4 ranks     0 frozen  4 x 1     layers 3 3 3 3
//                            9 frozen  2 x 2     layers 8 4 on ranks 0 1, and on ranks 2 3
//                           11 frozen  1 x 4     layers 12 on each
//
// Replica r has ranks r K to (r + 1) K - 1, in the order of the layers.

// How many ranks a pipeline has, how many of it there are, and how its layers are cut.
struct ElasticPlan {
  int64_t ranks_per_pipeline = 1;
  int64_t replicas = 1;
  std::vector<int64_t> balance = {};  // layers of each rank of a pipeline
  double seconds = 0;                 // what the most costly of these costs, in the unit of costs

  // Compares all but seconds.
  bool operator==(const ElasticPlan& other) const {
    return ranks_per_pipeline == other.ranks_per_pipeline && replicas == other.replicas &&
           balance == other.balance;
  }
};

struct ElasticPlanRequest {
  std::vector<double> costs = {};  // of each layer, while it is trained, in any unit
  int64_t frozen = 0;              // layers, from the input on
  int64_t ranks = 1;               // all that there are
  // Ranks of the pipeline that the run began with: `ranks` if absent; and of the present one:
  // `first` if absent. Both are factors of `ranks`.
  std::optional<int64_t> first = {};
  std::optional<int64_t> before = {};
  // What a frozen layer costs: this share of its cost, or these numbers, one per layer. 1/6 is the
  // paper's, for memory.
  double frozen_factor = 1.0 / 6;
  std::vector<double> frozen_costs = {};
  // The bytes of each layer, and those that a rank may have: both or neither.
  std::vector<int64_t> memory = {};
  std::optional<int64_t> limit = {};
  // Whether the frozen layers are one, which is not cut: where their outputs are cached.
  bool keep_frozen_together = false;
};

// Halves the ranks of the present pipeline while their number is even, while the most costly part
// of the best cut costs at most what the most costly part of all layers, trained, in `first` parts
// costs, and while bytes keep to the limit; see partition(). Fewer layers than ranks, where frozen
// ones are kept together, are halved in any case.
//
// Throws ValueError for numbers that cannot be, and what partition() throws.
TRIREME_API ElasticPlan elastic_plan(const ElasticPlanRequest& request);

// Returns the ranks that hold each layer under a plan, in ascending order: one in each replica.
TRIREME_API std::vector<std::vector<int64_t>> layer_holders(const ElasticPlan& plan);

// Returns "2 x 2 of 8 4 layers".
TRIREME_API std::string plan_text(const ElasticPlan& plan);

}  // namespace trireme
