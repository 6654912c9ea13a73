#include <trireme/memory/shard_plan.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <sstream>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kFlatBoundary = 16;   // elements
constexpr int64_t kStoreBoundary = 64;  // bytes

using Shards = std::vector<ShardRange>;

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t bytes_of(const ParameterInfo& parameter, int64_t numel) {
  return numel * static_cast<int64_t>(c10::elementSize(parameter.dtype));
}

// Returns the part of [0, numel) in [begin, end).
ShardRange within(int64_t numel, int64_t begin, int64_t end) {
  const int64_t first = std::max<int64_t>(begin, 0);
  const int64_t last = std::min(end, numel);
  return first < last ? ShardRange{first, last - first} : ShardRange{};
}

Shards rows_of(const ParameterInfo& parameter, int64_t world) {
  const int64_t rows = parameter.sizes.empty() ? 1 : parameter.sizes.front();
  Shards shards(static_cast<size_t>(world));
  if (rows == 0) return shards;
  const int64_t row = parameter.numel / rows;
  for (int64_t rank = 0; rank < world; ++rank) {
    const ChunkRows own = chunk_rows(rows, {rank, world});
    if (own.count * row > 0) shards[static_cast<size_t>(rank)] = {own.first * row, own.count * row};
  }
  return shards;
}

std::vector<Shards> flat_runs(const ShardPlanRequest& request) {
  int64_t total = 0;
  for (const ParameterInfo& parameter : request.parameters) total += parameter.numel;
  const int64_t run = ceil_div(ceil_div(total, request.world), kFlatBoundary) * kFlatBoundary;

  std::vector<Shards> shards;
  int64_t start = 0;
  for (const ParameterInfo& parameter : request.parameters) {
    Shards& of_parameter = shards.emplace_back();
    for (int64_t rank = 0; rank < request.world; ++rank) {
      of_parameter.push_back(within(parameter.numel, rank * run - start, (rank + 1) * run - start));
    }
    start += parameter.numel;
  }
  return shards;
}

std::vector<Shards> whole_parameters(const ShardPlanRequest& request) {
  const std::vector<ParameterInfo>& parameters = request.parameters;
  std::vector<size_t> largest_first(parameters.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::stable_sort(largest_first.begin(), largest_first.end(), [&](size_t a, size_t b) {
    return bytes_of(parameters[a], parameters[a].numel) >
           bytes_of(parameters[b], parameters[b].numel);
  });

  const auto world = static_cast<size_t>(request.world);
  std::vector<Shards> shards(parameters.size(), Shards(world));
  std::vector<int64_t> load(world, 0);
  for (const size_t index : largest_first) {
    const ParameterInfo& parameter = parameters[index];
    const auto owner =
        static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    shards[index][owner] = {0, parameter.numel};
    load[owner] += bytes_of(parameter, parameter.numel);
  }
  return shards;
}

}  // namespace

ChunkRows chunk_rows(int64_t rows, RankOf where) {
  ChunkRows own;
  own.most = ceil_div(rows, where.world);
  own.first = std::min(where.rank * own.most, rows);
  own.count = std::min(own.most, rows - own.first);
  return own;
}

const ShardRange& ShardPlan::of(int64_t parameter, int64_t rank) const {
  return shards[static_cast<size_t>(parameter)][static_cast<size_t>(rank)];
}

ShardPlan make_shard_plan(const ShardPlanRequest& request) {
  TORCH_CHECK_VALUE(
      request.world >= 1,
      error_text("shard_plan",
                 "got a world of " + std::to_string(request.world) + ", expected at least one rank",
                 {}, "Give the number of ranks that share the parameters."));
  ShardPlan plan{request.world, request.placement, {}};
  switch (request.placement) {
    case ShardPlacement::kDim0:
      for (const ParameterInfo& parameter : request.parameters) {
        plan.shards.push_back(rows_of(parameter, request.world));
      }
      break;
    case ShardPlacement::kFlat:
      plan.shards = flat_runs(request);
      break;
    case ShardPlacement::kWhole:
      plan.shards = whole_parameters(request);
      break;
  }
  return plan;
}

std::string to_string(const ShardPlan& plan, const std::vector<ParameterInfo>& parameters) {
  std::ostringstream text;
  for (int64_t rank = 0; rank < plan.world; ++rank) {
    int64_t bytes = 0;
    std::vector<size_t> owned;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const int64_t numel = plan.of(static_cast<int64_t>(i), rank).numel;
      if (numel == 0) continue;
      bytes += bytes_of(parameters[i], numel);
      owned.push_back(i);
    }
    text << "rank " << rank << ": " << bytes << " bytes of " << owned.size()
         << (owned.size() == 1 ? " parameter" : " parameters");
    if (!owned.empty()) text << ": " << parameters[owned.front()].name;
    if (owned.size() > 1) text << " .. " << parameters[owned.back()].name;
    text << '\n';
  }
  return text.str();
}

std::vector<int64_t> shard_sizes(const ParameterInfo& parameter, const ShardRange& range,
                                 ShardPlacement placement) {
  if (placement == ShardPlacement::kFlat) return {range.numel};
  if (range.numel == parameter.numel) return parameter.sizes;
  if (placement == ShardPlacement::kWhole || parameter.sizes.empty()) return {0};
  std::vector<int64_t> sizes = parameter.sizes;
  sizes.front() = range.numel / (parameter.numel / sizes.front());
  return sizes;
}

StoreLayout make_store_layout(const std::vector<ParameterInfo>& parameters) {
  StoreLayout layout;
  for (const ParameterInfo& parameter : parameters) {
    layout.offsets.push_back(layout.bytes);
    layout.bytes += ceil_div(bytes_of(parameter, parameter.numel), kStoreBoundary) * kStoreBoundary;
  }
  return layout;
}

}  // namespace trireme
