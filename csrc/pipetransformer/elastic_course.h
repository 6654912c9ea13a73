#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/strategies/pipeline/elastic_plan.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

struct ElasticOptions {
  std::vector<std::string> layers = {};  // from the input on
  int64_t global_batch = 0;              // rows of a step, on all ranks together
  // Micro-batches of a step. Their rows are the same under all plans, but for pipelines of one
  // rank, which take their rows at once.
  int64_t chunks = 1;
  bool pipe = true;                // whether pipelines shrink as layers freeze
  bool replicas = true;            // whether ranks set free run replicas
  bool cached = false;             // whether frozen layers cost nothing, and are not cut
  std::vector<double> costs = {};  // of trained layers, in any unit; measured if empty
};

// One epoch as it was.
struct ElasticEpoch {
  int64_t epoch = 0;
  int64_t frozen = 0;  // layers
  int64_t ranks_per_pipeline = 1;
  int64_t replicas = 1;
  double seconds = 0;  // of the slowest rank
  int64_t hits = 0;    // of the cache, on all ranks
};

// Half-open: [begin, end).
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const IndexRange&) const = default;
};

// How the plans of an elastic run follow each other, on all ranks alike: what each rank holds and
// computes under the present one. It knows layers by their names only; who owns it moves them. One
// thread at a time.
class TRIREME_API ElasticCourse {
 public:
  // `ranks`: all of the run; null for one process. Collective. Throws ValueError on all ranks for
  // options that differ or cannot be: a batch that some plan cannot divide, fewer layers than
  // ranks, costs below 0.
  ElasticCourse(ElasticOptions options, std::shared_ptr<Communicator> ranks);

  // Returns whether take_costs() must come before the first plan.
  bool needs_costs() const { return costs_.empty(); }
  // Takes what each layer costs, in seconds: the mean of what the ranks have measured. Collective.
  // Throws ValueError on all ranks where one has other numbers than one per layer, 0 or more.
  void take_costs(const std::vector<double>& forward, const std::vector<double>& backward);

  // Returns the plan that follows the present one once `frozen` layers are frozen; where there is
  // none, or fewer are frozen than before, the plan of a run that begins with them. No collective.
  ElasticPlan next_plan(int64_t frozen) const;
  // Throws ValueError for a plan of other ranks or layers, or one that cannot divide the batch.
  void check_plan(const ElasticPlan& plan) const;
  // Makes a plan, checked, the present one.
  void adopt(const ElasticPlan& plan, int64_t frozen);

  bool has_plan() const { return plan_.has_value(); }
  // Returns the present plan. This and what follows throw ValueError before there is one.
  const ElasticPlan& plan() const;
  // Return the rows of a global batch that this rank's pipeline takes, in how many micro-batches,
  // and the layers that this rank holds.
  IndexRange rows() const;
  int64_t micro_batches() const;
  IndexRange own_layers() const;
  // Returns "rank 3 of 4 under the plan 2 x 2 of 8 4 layers", for messages.
  std::string where() const;

  // Throws ValueError on all ranks where one has a batch of another number of rows, or `ids` that
  // are not one int64 per row; undefined ones only without a cache. Collective: one gather of a
  // number, so that no rank goes into a step alone.
  void check_batch(int64_t rows, const at::Tensor& ids) const;
  // Returns the mean of the losses of all pipelines, 0-dim, on all ranks. Collective where there
  // are several.
  at::Tensor mean_loss(const at::Tensor& loss) const;

  // Ends an epoch under the present plan; `frozen` layers were frozen in it. Collective. Throws
  // ValueError on all ranks where their plans or epochs differ.
  const ElasticEpoch& end_epoch(int64_t frozen, double seconds, int64_t hits);
  const std::vector<ElasticEpoch>& history() const { return history_; }

  const ElasticOptions& options() const { return options_; }
  const std::shared_ptr<Communicator>& ranks() const { return ranks_; }

 private:
  int64_t layers() const { return static_cast<int64_t>(options_.layers.size()); }
  int64_t world() const { return ranks_ ? ranks_->world() : 1; }
  int64_t rank() const { return ranks_ ? ranks_->rank() : 0; }
  std::string checked_text() const;
  std::string batch_text(int64_t rows, const at::Tensor& ids) const;
  ElasticPlan fixed_plan() const;
  void check_division(int64_t ranks_per_pipeline) const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  ElasticOptions options_;
  std::shared_ptr<Communicator> ranks_;
  std::vector<double> costs_;
  std::vector<double> forward_costs_;  // measured; empty where costs were given
  std::optional<ElasticPlan> plan_;
  int64_t frozen_ = 0;  // what the plan was made for
  std::vector<ElasticEpoch> history_;
};

}  // namespace trireme
