#include <trireme/strategies/data_parallel/speed_balance.h>

#include <algorithm>
#include <numeric>

namespace trireme {
namespace {

constexpr int64_t kWarmUpSteps = 2;  // in which memory is touched for the first time
constexpr double kSmoothing = 0.2;   // weight of the last step
constexpr double kWorthwhile = 0.05;

// Returns the time of the slowest replica for one row of the batch.
double slowest(const std::vector<double>& weights, const std::vector<double>& ms_per_row) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double most = 0;
  for (size_t i = 0; i < weights.size(); ++i)
    most = std::max(most, weights[i] / total * ms_per_row[i]);
  return most;
}

}  // namespace

SpeedBalance::SpeedBalance(size_t replicas) : weights_(replicas, 1.0), ms_per_row_(replicas, 0.0) {}

void SpeedBalance::record(const std::vector<Chunk>& chunks,
                          const std::vector<double>& milliseconds) {
  if (++steps_ <= kWarmUpSteps) return;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i].rows <= 0 || milliseconds[i] <= 0) continue;
    double& known = ms_per_row_[chunks[i].replica];
    const double now = milliseconds[i] / static_cast<double>(chunks[i].rows);
    known = known == 0 ? now : (1 - kSmoothing) * known + kSmoothing * now;
  }
  if (std::find(ms_per_row_.begin(), ms_per_row_.end(), 0.0) != ms_per_row_.end()) return;
  std::vector<double> better;
  for (const double ms : ms_per_row_) better.push_back(1 / ms);
  if (slowest(better, ms_per_row_) <= (1 - kWorthwhile) * slowest(weights_, ms_per_row_)) {
    weights_ = std::move(better);
  }
}

}  // namespace trireme
