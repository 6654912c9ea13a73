#include <trireme/strategies/pipeline/partition.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

namespace trireme {
namespace {

// Finds the layers that fit into one part, from sums of all layers in front of each.
class LayerSums {
 public:
  explicit LayerSums(const PartitionRequest& request)
      : layers_(static_cast<int64_t>(request.costs.size())),
        costs_{0},
        bytes_{0},
        limit_(request.limit.value_or(std::numeric_limits<int64_t>::max())) {
    for (const double cost : request.costs) costs_.push_back(costs_.back() + cost);
    for (const int64_t bytes : request.memory) bytes_.push_back(bytes_.back() + bytes);
    bytes_.resize(costs_.size(), 0);
  }

  int64_t layers() const { return layers_; }
  double cost(int64_t begin, int64_t end) const { return at(costs_, end) - at(costs_, begin); }
  double whole_cost() const { return cost(0, layers_); }
  double largest_layer() const {
    double largest = 0;
    for (int64_t i = 0; i < layers_; ++i) largest = std::max(largest, cost(i, i + 1));
    return largest;
  }

  // Returns behind which layer a part ends at the latest that begins at `begin` and costs at most
  // `most`; `begin` where not even one layer fits.
  int64_t reach(int64_t begin, double most) const {
    int64_t low = begin;
    int64_t high = layers_;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (cost(begin, middle) <= most && at(bytes_, middle) - at(bytes_, begin) <= limit_) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // Returns how many parts there are at least. Every layer must fit.
  int64_t fewest_parts(double most) const {
    int64_t parts = 0;
    for (int64_t begin = 0; begin < layers_; begin = reach(begin, most)) ++parts;
    return parts;
  }

 private:
  template <typename Number>
  static Number at(const std::vector<Number>& sums, int64_t layer) {
    return sums[static_cast<size_t>(layer)];
  }

  int64_t layers_;
  std::vector<double> costs_;
  std::vector<int64_t> bytes_;
  int64_t limit_;
};

void check_layers(const PartitionRequest& request) {
  const auto layers = static_cast<int64_t>(request.costs.size());
  if (request.parts < 1 || layers < request.parts) {
    refuse_pipeline("got " + std::to_string(layers) + " layers for " +
                        std::to_string(request.parts) +
                        " parts, expected at least one layer in each",
                    "Use fewer parts, or cut the model into smaller layers.");
  }
  double sum = 0;
  for (size_t i = 0; i < request.costs.size(); ++i) {
    sum += request.costs[i];
    if (!(request.costs[i] >= 0) || !std::isfinite(sum)) {
      refuse_pipeline("got the cost " + std::to_string(request.costs[i]) + " for layer " +
                          std::to_string(i) + ", expected a finite number >= 0",
                      "Measure the layer again.");
    }
  }
}

void check_memory(const PartitionRequest& request) {
  if (!request.limit && request.memory.empty()) return;
  if (!request.limit) {
    refuse_pipeline("got the bytes of layers without a limit, expected both or neither",
                    "Pass the limit, too.");
  }
  if (request.memory.size() != request.costs.size()) {
    refuse_pipeline("got bytes for " + std::to_string(request.memory.size()) +
                        " layers, expected " + std::to_string(request.costs.size()),
                    "Give one number per layer.");
  }
  int64_t sum = 0;
  for (size_t i = 0; i < request.memory.size(); ++i) {
    const int64_t bytes = request.memory[i];
    if (bytes < 0 || __builtin_add_overflow(sum, bytes, &sum)) {
      refuse_pipeline("got " + std::to_string(bytes) + " bytes for layer " + std::to_string(i) +
                          ", expected 0 or more, and a sum that 64 bits hold",
                      "Count the bytes again.");
    }
    if (bytes > *request.limit) {
      refuse_pipeline("got layer " + std::to_string(i) + " of " + std::to_string(bytes) +
                          " bytes, expected at most " + std::to_string(*request.limit) +
                          ", the limit of a part",
                      "Raise the limit, or cut that layer into smaller ones.");
    }
  }
}

// Returns the least cost of the largest part. Every double is a candidate: they are searched by
// their bits, whose order is that of the numbers where these are >= 0.
double least_largest(const LayerSums& sums, int64_t parts) {
  auto low = std::bit_cast<uint64_t>(sums.largest_layer());
  auto high = std::bit_cast<uint64_t>(sums.whole_cost());
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (sums.fewest_parts(std::bit_cast<double>(middle)) <= parts) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return std::bit_cast<double>(high);
}

// Returns, for each cut, in front of which layer it lies at the earliest, if those behind it are to
// have room.
std::vector<int64_t> earliest_cuts(const LayerSums& sums, int64_t parts, double most) {
  std::vector<int64_t> earliest(static_cast<size_t>(parts) + 1, sums.layers());
  int64_t begin = sums.layers();
  for (int64_t cut = parts - 1; cut > 0; --cut) {
    const int64_t next = begin;
    while (begin > 0 && sums.reach(begin - 1, most) >= next) --begin;
    begin = std::max(begin, cut);
    earliest[static_cast<size_t>(cut)] = begin;
  }
  return earliest;
}

}  // namespace

std::optional<std::vector<int64_t>> partition_if_fits(const PartitionRequest& request) {
  check_layers(request);
  check_memory(request);
  const LayerSums sums(request);
  if (sums.fewest_parts(sums.whole_cost()) > request.parts) return std::nullopt;
  const double most = least_largest(sums, request.parts);
  const std::vector<int64_t> earliest = earliest_cuts(sums, request.parts, most);
  std::vector<int64_t> sizes;
  int64_t begin = 0;
  for (int64_t part = 0; part < request.parts; ++part) {
    const int64_t left = request.parts - part;
    const int64_t even = begin + (sums.layers() - begin + left - 1) / left;
    const int64_t first = std::max(begin + 1, earliest[static_cast<size_t>(part) + 1]);
    const int64_t last = std::min(sums.reach(begin, most), sums.layers() - left + 1);
    const int64_t end = std::clamp(even, first, last);
    sizes.push_back(end - begin);
    begin = end;
  }
  return sizes;
}

std::vector<int64_t> partition(const PartitionRequest& request) {
  if (auto sizes = partition_if_fits(request)) return *std::move(sizes);
  const LayerSums sums(request);
  refuse_pipeline("got layers 0 to " + std::to_string(sums.layers() - 1) + " for " +
                      std::to_string(request.parts) + " parts, expected at least " +
                      std::to_string(sums.fewest_parts(sums.whole_cost())) + " parts of at most " +
                      std::to_string(*request.limit) + " bytes",
                  "Raise the limit, or use more parts.");
}

}  // namespace trireme
