#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: the rows of a step]
//
// Step k is the same rows of the data, in the same order, on any number of ranks: an epoch is
// rows / size steps, which go through at::randperm(rows) of a generator that is seeded by the seed
// and the number of the epoch. The rows that are left over at the end of a permutation come in
// others. Ranks take parts of the batch that follow each other, so a run that goes on with more or
// fewer ranks sees the rows of an undisturbed one.

struct GlobalBatchOptions {
  int64_t rows = 0;     // of the data
  int64_t size = 0;     // rows of a step, on all ranks together
  bool shuffle = true;  // false: every epoch is the first rows in their order
  int64_t seed = 0;
  // How many rows each rank takes, by any numbers >= 0 that are in this proportion; empty: equally
  // many.
  std::vector<double> balance = {};
  // Whose part it is; null: the ranks of the last trireme::init(), or one rank if there was none.
  std::shared_ptr<Communicator> communicator = nullptr;
  std::optional<RankOf> where = {};  // in place of the communicator's
};

// One rank's part of a step.
struct BatchPart {
  int64_t number = 0;  // of the step
  int64_t epoch = 0;
  at::Tensor rows;  // int64, may be empty
  // Rows of this rank x ranks / size: under a strategy that averages gradients,
  // (mean_loss * weight).backward() gives the gradient of the whole batch. 0 for an empty part.
  double weight = 0;
};

// Which rows of the data are a step, and which of them this rank's; see [Note: the rows of a step].
// It is no loader: it reads no data. One thread at a time.
class TRIREME_API GlobalBatch {
 public:
  // Throws ValueError for options that give no batch.
  explicit GlobalBatch(GlobalBatchOptions options);

  // Returns all rows of a step, int64. All three throw ValueError for a step < 0.
  at::Tensor whole(int64_t step);
  // Returns this rank's part; the next step is then the one after it.
  BatchPart part(int64_t step);
  // Returns the part of any rank.
  BatchPart part(int64_t step, RankOf where);

  RankOf where() const { return where_; }
  int64_t next_step() const { return next_step_; }
  // Returns what a checkpoint keeps: a JSON object with rows, size, shuffle, seed and next step.
  std::string state() const;
  // Takes over the next step of a state. Throws ValueError naming both for one of other rows,
  // another size or seed.
  void load_state(const std::string& text);

 private:
  at::Tensor rows_of(int64_t epoch);
  std::vector<int64_t> counts_for(int64_t world) const;
  void check(const GlobalBatchOptions& options) const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  GlobalBatchOptions options_;
  RankOf where_;
  int64_t next_step_ = 0;
  int64_t epoch_ = -1;  // of `permutation_`
  at::Tensor permutation_;
};

}  // namespace trireme
