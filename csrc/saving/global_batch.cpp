#include <trireme/saving/global_batch.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/comm/launch/ranks.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

// See [Note: the rows of a step] in global_batch.h.

namespace trireme {
namespace {

RankOf place_in(const GlobalBatchOptions& options) {
  if (options.where) return *options.where;
  if (options.communicator) return options.communicator->rank_of();
  try {
    return current_communicator()->rank_of();
  } catch (const c10::ValueError&) {  // There is no group.
    return {0, 1};
  }
}

// Returns `total` in shares in proportion to `weights`, each rounded down; what is left goes to the
// largest remainders, of equal ones to the first.
std::vector<int64_t> largest_remainders(int64_t total, const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> counts;
  std::vector<double> remainders;
  for (const double weight : weights) {
    const double share = static_cast<double>(total) * (weight / sum);
    counts.push_back(std::min(static_cast<int64_t>(share), total));
    remainders.push_back(weight > 0 ? share - std::floor(share) : -1);
  }
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t one, size_t other) { return remainders[one] > remainders[other]; });
  int64_t left = total - std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for (size_t i = 0; left > 0; i = (i + 1) % order.size()) {
    if (weights[order[i]] <= 0) continue;
    ++counts[order[i]];
    --left;
  }
  return counts;
}

}  // namespace

GlobalBatch::GlobalBatch(GlobalBatchOptions options)
    : options_(std::move(options)), where_(place_in(options_)) {
  check(options_);
  options_.communicator.reset();
}

at::Tensor GlobalBatch::whole(int64_t step) {
  if (step < 0) refuse(c10::str("got step ", step, ", expected 0 or more"), "Count from 0.");
  const int64_t steps = options_.rows / options_.size;
  return rows_of(step / steps).narrow(0, step % steps * options_.size, options_.size);
}

BatchPart GlobalBatch::part(int64_t step) {
  BatchPart part = this->part(step, where_);
  next_step_ = step + 1;
  return part;
}

BatchPart GlobalBatch::part(int64_t step, RankOf where) {
  if (where.world < 1 || where.rank < 0 || where.rank >= where.world)
    refuse(c10::str("got the part of rank ", where.rank, " of ", where.world),
           "Count ranks from 0.");
  const at::Tensor all = whole(step);
  const std::vector<int64_t> counts = counts_for(where.world);
  const auto rank = static_cast<size_t>(where.rank);
  const int64_t first = std::accumulate(counts.begin(), counts.begin() + where.rank, int64_t{0});
  const double weight = static_cast<double>(counts[rank]) * static_cast<double>(where.world) /
                        static_cast<double>(options_.size);
  return {step, step / (options_.rows / options_.size), all.narrow(0, first, counts[rank]).clone(),
          weight};
}

std::string GlobalBatch::state() const {
  return nlohmann::ordered_json{{"rows", options_.rows},
                                {"size", options_.size},
                                {"shuffle", options_.shuffle},
                                {"seed", options_.seed},
                                {"next_step", next_step_}}
      .dump();
}

void GlobalBatch::load_state(const std::string& text) {
  nlohmann::json state;
  int64_t next_step = -1;
  try {
    state = nlohmann::json::parse(text);
    next_step = state.at("next_step").get<int64_t>();
  } catch (const nlohmann::json::exception& error) {
    refuse(std::string("got no state of a GlobalBatch: ") + error.what(),
           "Pass what state_dict() has returned.");
  }
  const auto own = nlohmann::json::parse(this->state());
  for (const char* name : {"rows", "size", "shuffle", "seed"})
    if (!state.contains(name) || state.at(name) != own.at(name))
      refuse(c10::str("got a state with ", name, "=",
                      state.contains(name) ? state.at(name).dump() : "nothing", ", expected ", name,
                      "=", own.at(name).dump()),
             "Make the GlobalBatch as it was when the state was saved.");
  if (next_step < 0)
    refuse(c10::str("got a state whose next step is ", next_step),
           "Load the state as it was saved.");
  next_step_ = next_step;
}

// Returns the rows of an epoch in their order.
at::Tensor GlobalBatch::rows_of(int64_t epoch) {
  if (epoch_ == epoch) return permutation_;
  if (options_.shuffle) {
    const uint64_t seed = rank_seed(static_cast<uint64_t>(options_.seed), epoch);
    permutation_ = at::randperm(options_.rows, at::detail::createCPUGenerator(seed), at::kLong);
  } else {
    permutation_ = at::arange(options_.rows, at::kLong);
  }
  epoch_ = options_.shuffle ? epoch : -1;
  return permutation_;
}

// Returns how many rows of a step each rank takes.
std::vector<int64_t> GlobalBatch::counts_for(int64_t world) const {
  const auto ranks = static_cast<size_t>(world);
  const std::vector<double>& balance = options_.balance;
  if (!balance.empty() && balance.size() != ranks)
    refuse(c10::str("got a balance of ", balance.size(), " numbers for ", world, " ranks"),
           "Give a number for each rank.");
  if (!balance.empty()) return largest_remainders(options_.size, balance);
  std::vector<int64_t> counts(ranks, options_.size / world);
  for (int64_t rank = 0; rank < options_.size % world; ++rank) ++counts[static_cast<size_t>(rank)];
  return counts;
}

void GlobalBatch::check(const GlobalBatchOptions& options) const {
  if (options.size < 1 || options.rows < options.size)
    refuse(c10::str("got rows=", options.rows, " and size=", options.size,
                    ", expected 1 <= size <= rows"),
           "Pass the rows of the data and of one step.");
  if (where_.world < 1 || where_.rank < 0 || where_.rank >= where_.world)
    refuse(c10::str("got rank=", where_.rank, " and world=", where_.world,
                    ", expected 0 <= rank < world"),
           "Count ranks from 0.");
  double sum = 0;
  for (const double weight : options.balance) {
    if (!(weight >= 0) || !std::isfinite(weight))
      refuse(c10::str("got ", weight, " in the balance, expected numbers >= 0"),
             "Give each rank a share.");
    sum += weight;
  }
  if (!options.balance.empty() && !(sum > 0 && std::isfinite(sum)))
    refuse(c10::str("got a balance whose sum is ", sum), "Give some rank a share.");
  counts_for(where_.world);
}

void GlobalBatch::refuse(const std::string& got, const std::string& next_step) const {
  TORCH_CHECK_VALUE(false, error_text("global_batch", got, where_, next_step));
}

}  // namespace trireme
