#include <trireme/strategies/pipeline/elastic_plan.h>

#include <trireme/strategies/pipeline/partition.h>
#include <trireme/strategies/pipeline/refuse.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

namespace trireme {
namespace {

// 18 layers of 1/6 are 3, though their sum in fp64 is a little more.
constexpr double kRounding = 1e-9;

double largest_part(const std::vector<double>& costs, const std::vector<int64_t>& balance) {
  double largest = 0;
  auto begin = costs.begin();
  for (const int64_t layers : balance) {
    largest = std::max(largest, std::accumulate(begin, begin + layers, 0.0));
    begin += layers;
  }
  return largest;
}

// Makes one layer of the first `count` ones.
template <typename Number>
void join_first(std::vector<Number>& layers, int64_t count) {
  if (count < 2 || layers.empty()) return;
  layers.front() = std::accumulate(layers.begin(), layers.begin() + count, Number{});
  layers.erase(layers.begin() + 1, layers.begin() + count);
}

// What the layers of a request cost now, and how they are cut.
class PresentLayers {
 public:
  explicit PresentLayers(const ElasticPlanRequest& request)
      : costs_(request.costs),
        memory_(request.memory),
        limit_(request.limit),
        joined_(request.keep_frozen_together ? std::max<int64_t>(request.frozen, 1) : 1) {
    for (size_t i = 0; i < static_cast<size_t>(request.frozen); ++i)
      costs_[i] = request.frozen_costs.empty() ? costs_[i] * request.frozen_factor
                                               : request.frozen_costs[i];
    join_first(costs_, joined_);
    if (!memory_.empty()) join_first(memory_, joined_);
  }

  bool can_be_cut_into(int64_t parts) const { return parts <= static_cast<int64_t>(costs_.size()); }
  PartitionRequest request(int64_t parts) const { return {costs_, parts, memory_, limit_}; }
  double largest(const std::vector<int64_t>& balance) const {
    return largest_part(costs_, balance);
  }
  // Returns how many of the request's layers each part has.
  std::vector<int64_t> counted(std::vector<int64_t> balance) const {
    balance.front() += joined_ - 1;
    return balance;
  }

 private:
  std::vector<double> costs_;
  std::vector<int64_t> memory_;
  std::optional<int64_t> limit_;
  int64_t joined_;
};

void check_ranks(const char* name, int64_t ranks, int64_t all) {
  if (ranks >= 1 && all % ranks == 0) return;
  refuse_pipeline("got " + std::to_string(ranks) + " ranks as " + name + ", expected a factor of " +
                      std::to_string(all),
                  "Every rank is in one of the replicas.");
}

void check_cost(double cost, const std::string& name) {
  if (cost >= 0 && std::isfinite(cost)) return;
  refuse_pipeline("got the cost " + std::to_string(cost) + name + ", expected a finite number >= 0",
                  "Measure the layer again.");
}

void check(const ElasticPlanRequest& request) {
  const auto layers = static_cast<int64_t>(request.costs.size());
  if (request.ranks < 1)
    refuse_pipeline("got " + std::to_string(request.ranks) + " ranks, expected 1 or more",
                    "Pass how many there are.");
  if (request.frozen < 0 || request.frozen > layers)
    refuse_pipeline(
        "got " + std::to_string(request.frozen) + " frozen layers of " + std::to_string(layers),
        "Pass how many of the layers are frozen, from the input on.");
  check_ranks("first", request.first.value_or(request.ranks), request.ranks);
  if (request.before) check_ranks("before", *request.before, request.ranks);
  check_cost(request.frozen_factor, " of frozen layers");
  const size_t given = request.frozen_costs.size();
  if (given != 0 && given != request.costs.size())
    refuse_pipeline("got " + std::to_string(given) + " costs of frozen layers, expected " +
                        std::to_string(layers),
                    "Give one number per layer, or one factor for all.");
  for (size_t i = 0; i < given; ++i)
    check_cost(request.frozen_costs[i], " for frozen layer " + std::to_string(i));
}

}  // namespace

ElasticPlan elastic_plan(const ElasticPlanRequest& request) {
  check(request);
  const int64_t first = request.first.value_or(request.ranks);
  const PartitionRequest trained{request.costs, first};
  const double most = largest_part(request.costs, partition(trained)) * (1 + kRounding);
  const PresentLayers layers(request);
  const auto fits = [&](int64_t ranks) {
    if (!layers.can_be_cut_into(ranks)) return true;  // on to fewer
    const auto cut = partition_if_fits(layers.request(ranks));
    return cut && (!layers.can_be_cut_into(2 * ranks) || layers.largest(*cut) <= most);
  };
  int64_t ranks = request.before.value_or(first);
  while (ranks % 2 == 0 && fits(ranks / 2)) ranks /= 2;
  const std::vector<int64_t> cut = partition(layers.request(ranks));
  return {ranks, request.ranks / ranks, layers.counted(cut), layers.largest(cut)};
}

std::vector<std::vector<int64_t>> layer_holders(const ElasticPlan& plan) {
  std::vector<std::vector<int64_t>> holders;
  for (int64_t part = 0; part < plan.ranks_per_pipeline; ++part) {
    std::vector<int64_t> ranks;
    for (int64_t replica = 0; replica < plan.replicas; ++replica)
      ranks.push_back(replica * plan.ranks_per_pipeline + part);
    holders.insert(holders.end(), static_cast<size_t>(plan.balance[static_cast<size_t>(part)]),
                   ranks);
  }
  return holders;
}

std::string plan_text(const ElasticPlan& plan) {
  std::string text =
      std::to_string(plan.ranks_per_pipeline) + " x " + std::to_string(plan.replicas) + " of";
  for (const int64_t layers : plan.balance) text += " " + std::to_string(layers);
  return text + " layers";
}

}  // namespace trireme
