#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/data_parallel/chunk_plan.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme {

// Gives replicas of different speed chunks that take them the same time. It learns from the times
// of steps, and moves the shares only where that promises to make the slowest replica faster by a
// twentieth, so that a batch is not cut anew for every tremor of the machine.
class TRIREME_API SpeedBalance {
 public:
  explicit SpeedBalance(size_t replicas);

  // Records the times of one step on each replica that had rows: rows and milliseconds, parallel to
  // `chunks`.
  void record(const std::vector<Chunk>& chunks, const std::vector<double>& milliseconds);

  // Returns shares of the batch, equal until every replica was measured.
  const std::vector<double>& weights() const { return weights_; }

 private:
  std::vector<double> weights_;
  std::vector<double> ms_per_row_;  // smoothed; 0: not yet known
  int64_t steps_ = 0;
};

}  // namespace trireme
