#include <trireme/strategies/data_parallel/chunk_plan.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

namespace trireme {
namespace {

// Returns shares of `rows` in proportion to `weights`, all of them positive: one row each, the rest
// by the largest remainder. At least as many rows as weights.
std::vector<int64_t> shares(int64_t rows, const std::vector<double>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> share(weights.size());
  std::vector<double> wanted(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    wanted[i] = static_cast<double>(rows) * (weights[i] / total);
    share[i] = std::max<int64_t>(1, static_cast<int64_t>(wanted[i]));
  }
  int64_t open = rows - std::accumulate(share.begin(), share.end(), int64_t{0});
  const auto missing = [&](size_t i) { return wanted[i] - static_cast<double>(share[i]); };
  const auto most_missing = [&](size_t a, size_t b) { return missing(a) < missing(b); };
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (; open > 0; --open) ++share[*std::max_element(order.begin(), order.end(), most_missing)];
  for (; open < 0; ++open) {
    // The single rows that were given away come from the replica with most rows beyond its share.
    const auto least = std::min_element(order.begin(), order.end(), [&](size_t a, size_t b) {
      if ((share[a] > 1) != (share[b] > 1)) return share[a] > 1;
      return missing(a) < missing(b);
    });
    --share[*least];
  }
  return share;
}

}  // namespace

std::vector<Chunk> even_chunks(int64_t rows, size_t replicas) {
  const auto count = static_cast<int64_t>(replicas);
  const int64_t each = (rows + count - 1) / count;
  std::vector<Chunk> chunks;
  for (int64_t begin = 0; begin < rows; begin += each)
    chunks.push_back({chunks.size(), std::min(each, rows - begin)});
  if (chunks.empty()) chunks.push_back({0, 0});
  return chunks;
}

std::vector<Chunk> weighted_chunks(int64_t rows, const std::vector<double>& weights) {
  std::vector<size_t> replicas;
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(weights[i]) && weights[i] >= 0,
                      error_text("data_parallel",
                                 "got the weight " + std::to_string(weights[i]) + " for replica " +
                                     std::to_string(i) + ", expected a finite number >= 0",
                                 {}, "Give one share of the batch per replica."));
    if (weights[i] > 0) replicas.push_back(i);
  }
  TORCH_CHECK_VALUE(!replicas.empty(),
                    error_text("data_parallel", "got no weight above 0, expected one at least", {},
                               "Give one share of the batch per replica."));
  if (rows <= 0) return {{replicas.front(), 0}};
  if (static_cast<size_t>(rows) < replicas.size()) {
    std::stable_sort(replicas.begin(), replicas.end(),
                     [&](size_t a, size_t b) { return weights[a] > weights[b]; });
    replicas.resize(static_cast<size_t>(rows));
    std::sort(replicas.begin(), replicas.end());
  }
  std::vector<double> positive;
  for (const size_t replica : replicas) positive.push_back(weights[replica]);
  const std::vector<int64_t> share = shares(rows, positive);
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < replicas.size(); ++i) chunks.push_back({replicas[i], share[i]});
  return chunks;
}

std::vector<int64_t> rows_like(const std::vector<Chunk>& chunks, int64_t rows) {
  std::vector<int64_t> like;
  std::vector<double> weights;
  int64_t total = 0;
  for (const Chunk& chunk : chunks) {
    like.push_back(chunk.rows);
    weights.push_back(static_cast<double>(chunk.rows));
    total += chunk.rows;
  }
  if (rows == total) return like;
  if (chunks.size() == 1) return {rows};
  TORCH_CHECK_VALUE(
      rows >= static_cast<int64_t>(chunks.size()),
      error_text("data_parallel",
                 "got a tensor of " + std::to_string(rows) + " rows beside one of " +
                     std::to_string(total) + ", expected at least one row for each of " +
                     std::to_string(chunks.size()) + " replicas",
                 {}, "Give all inputs the same batch size, or a 0-dim tensor, which all get."));
  return shares(rows, weights);
}

}  // namespace trireme
