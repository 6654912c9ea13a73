#include <trireme/strategies/fsdp/offload_plan.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>
#include <tuple>
#include <utility>

namespace trireme {
namespace {

// Returns how many parameters, from the front, come nearest to `wanted` bytes, and what is owed
// then.
std::pair<size_t, double> from_the_front(const std::vector<int64_t>& parameter_bytes,
                                         double wanted) {
  size_t count = 0;
  int64_t taken = 0;
  int64_t nearest = 0;
  for (size_t i = 0; i < parameter_bytes.size(); ++i) {
    taken += parameter_bytes[i];
    if (std::abs(static_cast<double>(taken) - wanted) >=
        std::abs(static_cast<double>(nearest) - wanted))
      continue;
    count = i + 1;
    nearest = taken;
  }
  return {count, wanted - static_cast<double>(nearest)};
}

}  // namespace

void check_offload(const Offload& offload, RankOf where) {
  const bool are_fractions =
      0 <= offload.params && offload.params <= offload.optimizer && offload.optimizer <= 1;
  if (are_fractions) return;
  std::ostringstream got;
  got << "got Offload(optimizer=" << offload.optimizer << ", params=" << offload.params
      << "), expected 0 <= params <= optimizer <= 1";
  C10_THROW_ERROR(ValueError, error_text("fully_shard", got.str(), where,
                                         "Pass fractions; what has no copy on the device is a part "
                                         "of what is offloaded."));
}

OffloadPlan make_offload_plan(const OffloadPlanRequest& request) {
  const std::vector<int64_t>& all = request.parameter_bytes;
  const auto unit_bytes = static_cast<double>(std::accumulate(all.begin(), all.end(), int64_t{0}));
  OffloadPlan plan{std::vector<ShardOffload>(all.size(), ShardOffload::kNone), {}};
  size_t count = 0;
  std::tie(count, plan.owed.optimizer) =
      from_the_front(all, request.optimizer * unit_bytes + request.owed.optimizer);
  const auto end = all.begin() + static_cast<int64_t>(count);
  size_t everything = 0;
  std::tie(everything, plan.owed.params) =
      from_the_front({all.begin(), end}, request.params * unit_bytes + request.owed.params);
  const auto first = plan.parameters.begin();
  std::fill_n(first, count, ShardOffload::kOptimizer);
  std::fill_n(first, everything, ShardOffload::kAll);
  return plan;
}

void place_offloaded(const Offload& offload, ParamGroupRequest& request, RankOf where) {
  check_offload(offload, where);
  if (request.device.is_cpu() && !offload.from_cpu) {
    if (where.rank != 0) return;
    TORCH_WARN_ONCE("[fully_shard] Offload: parameters are in CPU memory already");
    return;
  }
  std::vector<int64_t> parameter_bytes;
  for (const ShardedParamSpec& spec : request.specs) {
    const auto item = static_cast<int64_t>(c10::elementSize(spec.dtype));
    parameter_bytes.push_back(item * c10::multiply_integers(spec.sizes));
  }
  const OffloadPlan plan =
      make_offload_plan({offload.optimizer, offload.params, parameter_bytes, *offload.owed});
  *offload.owed = plan.owed;
  for (size_t i = 0; i < request.specs.size(); ++i) request.specs[i].offload = plan.parameters[i];
  request.pins_memory = offload.pin_memory;
}

}  // namespace trireme
