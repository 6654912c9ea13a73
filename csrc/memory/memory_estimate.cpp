#include <trireme/memory/memory_estimate.h>

#include <trireme/common/error.h>
#include <trireme/memory/shard_plan.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace trireme {
namespace {

constexpr std::string_view kEstimateArea = "memory_estimate";
constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
// grad/stream_transport.cpp has a ring of each rank, used for whole gradients of few ranks only.
constexpr int64_t kDepositRing = 8 * kMiB;
constexpr int64_t kMostStreamingRanks = 4;
// shm/host_group.cpp has slots and counters of each rank.
constexpr int64_t kSlotRings = 15 * kMiB;
constexpr int64_t kLargestSlotRing = 4 * kMiB;
constexpr int64_t kSmallestSlotRing = 512 * kKiB;
constexpr int64_t kSlotUnit = 64 * kKiB;
constexpr int64_t kCounters = 16 * kKiB;
// grad/launch_queue.cpp, where it reduces without deposits, has one bucket that fills and two on
// their way.
constexpr int64_t kBucket = 25 * kMiB;
constexpr int64_t kBuckets = 3;
// comm/scratch.h holds data received over Gloo before they are summed up.
constexpr int64_t kScratchBlocks = 2;
// param/prefetch.h lets one unit compute while the next one is on its way.
constexpr int64_t kGatheredUnits = 2;

template <typename Value, size_t count>
Value named(const std::array<std::pair<std::string_view, Value>, count>& values,
            std::string_view what, std::string_view name) {
  std::string names;
  for (const auto& [known, value] : values) {
    if (known == name) return value;
    names.append(names.empty() ? "" : ", ").append(known);
  }
  std::string text = "got ";
  text.append(what).append(" '").append(name).append("', expected one of ").append(names);
  C10_THROW_ERROR(ValueError, error_text(kEstimateArea, text, {}, "Give one of these names."));
}

// The bytes of the fullest rank, and of the fullest host.
struct Spread {
  int64_t rank = 0;
  int64_t host = 0;
};

int64_t largest_part(int64_t whole, int64_t parts) { return (whole + parts - 1) / parts; }

class Estimator {
 public:
  explicit Estimator(const MemoryRequest& request)
      : request_(request), ranks_(request.ranks_per_host), one_host_(ranks_ == request.world) {}

  MemoryEstimate by_paper() const {
    int64_t all = 0;
    int64_t trained = 0;
    for (const ParameterInfo& parameter : request_.parameters) {
      all += parameter.numel;
      if (parameter.requires_grad) trained += parameter.numel;
    }
    const auto kept = [&](int64_t bytes, TrainingStrategy sharded_from) {
      return of_each(request_.strategy >= sharded_from ? largest_part(bytes, request_.world)
                                                       : bytes);
    };
    return together(kept(2 * all, TrainingStrategy::kFsdp),
                    kept(2 * trained, TrainingStrategy::kZero2),
                    kept(12 * trained, TrainingStrategy::kZero1), of_each(module_buffers()));
  }

  MemoryEstimate by_library() const {
    switch (request_.strategy) {
      case TrainingStrategy::kSingle:
      case TrainingStrategy::kDdp:
        return together(of_each(parameters()), of_each(gradients()), of_each(states()), buffers());
      case TrainingStrategy::kDp:
        return together(of_host(parameters()), of_each(gradients()), of_host(states()),
                        of_each(module_buffers()));
      case TrainingStrategy::kZero1:
        return together(stored_parameters(), of_each(gradients()), sharded_states(), buffers());
      case TrainingStrategy::kZero2:
      case TrainingStrategy::kFsdp:
        return together(stored_parameters(), sharded_gradients(), sharded_states(), buffers());
    }
    return {};
  }

 private:
  Spread of_each(int64_t bytes) const { return {bytes, bytes * ranks_}; }
  Spread of_host(int64_t bytes) const { return {largest_part(bytes, ranks_), bytes}; }

  MemoryEstimate together(Spread parameters, Spread gradients, Spread optimizer,
                          Spread buffers) const {
    const Spread activations = of_each(request_.activation_bytes);
    return {{parameters.rank, gradients.rank, optimizer.rank, activations.rank, buffers.rank},
            {parameters.host, gradients.host, optimizer.host, activations.host, buffers.host}};
  }

  // Returns the bytes of one element.
  int64_t parameter_rate(const ParameterInfo& parameter) const {
    return static_cast<int64_t>(c10::elementSize(parameter.dtype));
  }
  int64_t gradient_rate(const ParameterInfo& parameter) const {
    if (!parameter.requires_grad) return 0;
    return static_cast<int64_t>(c10::elementSize(request_.grad_dtype.value_or(parameter.dtype)));
  }
  int64_t state_rate(const ParameterInfo& parameter) const {
    if (!parameter.requires_grad) return 0;
    if (request_.optimizer.bytes) return *request_.optimizer.bytes;
    const int64_t fp32 = c10::isComplexType(parameter.dtype) ? 8 : 4;
    return request_.optimizer.tensors * std::max(fp32, parameter_rate(parameter));
  }

  using Rate = int64_t (Estimator::*)(const ParameterInfo&) const;

  int64_t whole(Rate rate) const {
    int64_t bytes = 0;
    for (const ParameterInfo& parameter : request_.parameters) {
      bytes += parameter.numel * (this->*rate)(parameter);
    }
    return bytes;
  }

  // Returns the bytes of shards by the rule of ShardPlacement::kDim0, under which rank 0 has most,
  // and host 0.
  Spread by_rows(Rate rate) const {
    Spread found;
    for (const ParameterInfo& parameter : request_.parameters) {
      const int64_t rows = parameter.sizes.empty() ? 1 : parameter.sizes.front();
      if (parameter.numel == 0) continue;
      const int64_t of_row = parameter.numel / rows * (this->*rate)(parameter);
      const int64_t of_rank = largest_part(rows, request_.world);
      found.rank += of_rank * of_row;
      found.host += std::min(rows, of_rank * ranks_) * of_row;
    }
    return found;
  }

  int64_t parameters() const { return whole(&Estimator::parameter_rate); }
  int64_t gradients() const { return whole(&Estimator::gradient_rate); }
  int64_t states() const { return whole(&Estimator::state_rate); }
  int64_t module_buffers() const { return request_.module_buffer_bytes; }
  Spread sharded_gradients() const { return by_rows(&Estimator::gradient_rate); }
  Spread sharded_states() const { return by_rows(&Estimator::state_rate); }

  bool is_fsdp() const { return request_.strategy == TrainingStrategy::kFsdp; }
  bool has_store() const { return request_.host_params && (is_fsdp() ? ranks_ > 1 : one_host_); }
  bool gathers_units() const { return is_fsdp() && !has_store(); }

  Spread stored_parameters() const {
    if (request_.world == 1) return of_each(parameters());
    if (has_store()) return of_host(make_store_layout(request_.parameters).bytes);
    return gathers_units() ? by_rows(&Estimator::parameter_rate) : of_each(parameters());
  }

  Spread buffers() const {
    int64_t bytes = module_buffers();
    if (request_.world == 1) return of_each(bytes);
    const bool shards_gradients = request_.strategy >= TrainingStrategy::kZero2;
    const bool shares_memory = ranks_ > 1 && !gathers_units();
    if (shares_memory) {
      bytes += std::clamp(kSlotRings / ranks_ / kSlotUnit * kSlotUnit, kSmallestSlotRing,
                          kLargestSlotRing) +
               kCounters;
    }
    const bool streams = shares_memory && one_host_;
    if (streams && (shards_gradients || ranks_ <= kMostStreamingRanks)) {
      bytes += kDepositRing;
    } else if (shards_gradients) {
      bytes += std::min(kBuckets * kBucket, gradients());
      if (!shares_memory) bytes += std::min(kScratchBlocks * kBucket, gradients());
    }
    if (gathers_units()) bytes += gathered_units();
    return of_each(bytes);
  }

  // Returns the bytes of gathered units; an upper bound where these have several dtypes.
  int64_t gathered_units() const {
    int64_t numel = 0;
    int64_t widest = 0;
    for (const ParameterInfo& parameter : request_.parameters) {
      numel += parameter.numel;
      widest = std::max(widest, parameter_rate(parameter));
    }
    if (request_.unit_numel == 0 || request_.unit_numel >= numel) return parameters();
    return std::min(parameters(), kGatheredUnits * request_.unit_numel * widest);
  }

  const MemoryRequest& request_;
  int64_t ranks_;
  bool one_host_;
};

[[noreturn]] void refuse(const std::string& what, std::string_view next_step) {
  C10_THROW_ERROR(ValueError, error_text(kEstimateArea, what, {}, next_step));
}

void check_counts(const MemoryRequest& request) {
  const auto text = [](int64_t count) { return std::to_string(count); };
  if (request.world < 1) {
    refuse("got a world of " + text(request.world) + ", expected at least one rank",
           "Give the number of ranks.");
  }
  if (request.ranks_per_host < 1 || request.ranks_per_host > request.world) {
    refuse("got " + text(request.ranks_per_host) + " ranks per host, expected 1 to the world of " +
               text(request.world),
           "Give the ranks of the fullest host, or leave it out where all share one.");
  }
  if (request.activation_bytes < 0 || request.module_buffer_bytes < 0 || request.unit_numel < 0 ||
      request.optimizer.bytes.value_or(0) < 0 || request.optimizer.tensors < 0) {
    refuse("got a negative number of bytes or elements, expected 0 or more",
           "Look at activation_bytes, unit_numel and optimizer.");
  }
}

void check_range(const MemoryRequest& request) {
  double numel = 0;
  for (const ParameterInfo& parameter : request.parameters) {
    numel += static_cast<double>(parameter.numel);
  }
  // The widest element has 16 bytes, a store wastes 64 per parameter; the rest is a margin.
  const double of_element =
      128 + static_cast<double>(request.optimizer.bytes.value_or(request.optimizer.tensors * 16));
  const double of_rank = (numel + static_cast<double>(request.world)) * of_element +
                         static_cast<double>(request.parameters.size()) * 64 +
                         static_cast<double>(request.activation_bytes) +
                         static_cast<double>(request.module_buffer_bytes);
  if (of_rank * static_cast<double>(request.ranks_per_host) > 9e18) {
    refuse("got more bytes than 64 bits count, expected below 9e18 on a host",
           "Look at the number of parameters and ranks.");
  }
}

void check_strategy(const MemoryRequest& request) {
  if (request.strategy == TrainingStrategy::kSingle && request.world != 1) {
    refuse("got a world of " + std::to_string(request.world) + ", expected 1 for 'single'",
           "Give world=1, or a strategy for several ranks.");
  }
  if (request.accounting == MemoryAccounting::kPaper) {
    const bool is_adam = request.optimizer.tensors == 2 && !request.optimizer.bytes;
    if (!is_adam || request.grad_dtype || !request.host_params || request.unit_numel > 0) {
      refuse(
          "got a grad_dtype, an optimizer, host_params or unit_numel for the paper's accounting, "
          "which has its own: Adam in mixed precision",
          "Leave them at their defaults, or use accounting 'trireme'.");
    }
    return;
  }
  if (request.strategy == TrainingStrategy::kDp && request.ranks_per_host != request.world) {
    refuse("got " + std::to_string(request.ranks_per_host) + " of " +
               std::to_string(request.world) + " ranks per host, expected all of them for 'dp'",
           "Its replicas are threads of one process: choose 'ddp' for several hosts.");
  }
}

}  // namespace

TrainingStrategy training_strategy(std::string_view name) {
  using enum TrainingStrategy;
  constexpr std::array<std::pair<std::string_view, TrainingStrategy>, 6> kNames{
      {{"single", kSingle},
       {"dp", kDp},
       {"ddp", kDdp},
       {"zero1", kZero1},
       {"zero2", kZero2},
       {"fsdp", kFsdp}}};
  if (name == "zero3" || name == "fully_shard") return kFsdp;
  return named(kNames, "strategy", name);
}

MemoryAccounting memory_accounting(std::string_view name) {
  using enum MemoryAccounting;
  constexpr std::array<std::pair<std::string_view, MemoryAccounting>, 2> kNames{
      {{"trireme", kTrireme}, {"paper", kPaper}}};
  return named(kNames, "accounting", name);
}

OptimizerState optimizer_state(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, int64_t>, 4> kNames{
      {{"sgd", 0}, {"sgd_momentum", 1}, {"adam", 2}, {"adamw", 2}}};
  return {.tensors = named(kNames, "optimizer", name)};
}

MemoryEstimate estimate_memory(const MemoryRequest& request) {
  check_counts(request);
  check_strategy(request);
  check_range(request);
  const Estimator estimator(request);
  return request.accounting == MemoryAccounting::kPaper ? estimator.by_paper()
                                                        : estimator.by_library();
}

bool fits(const MemoryEstimate& estimate, MemoryLimit limit) {
  return (limit.of_rank ? estimate.rank : estimate.host).total() <= limit.bytes;
}

// Searches by hosts: from two on, the bytes of a host do not grow with their number.
std::optional<int64_t> fewest_ranks(const MemoryRequest& request, MemoryLimit limit) {
  constexpr int64_t kMostHosts = int64_t{1} << 20;
  if (limit.bytes < 0) {
    refuse("got a memory of " + std::to_string(limit.bytes) + " bytes, expected 0 or more",
           "Give the bytes of a host or rank.");
  }
  if (fits(estimate_memory(request), limit)) return request.world;
  if (request.strategy <= TrainingStrategy::kDp) return std::nullopt;  // one process, on one host
  MemoryRequest more = request;
  const auto enough = [&](int64_t hosts) {
    more.world = hosts * request.ranks_per_host;
    return fits(estimate_memory(more), limit);
  };
  int64_t too_few = largest_part(request.world, request.ranks_per_host);
  int64_t hosts = 2 * too_few;
  for (; !enough(hosts); hosts *= 2) {
    if (hosts > kMostHosts) return std::nullopt;
    too_few = hosts;
  }
  while (hosts - too_few > 1) {
    const int64_t middle = too_few + (hosts - too_few) / 2;
    (enough(middle) ? hosts : too_few) = middle;
  }
  return hosts * request.ranks_per_host;
}

}  // namespace trireme
