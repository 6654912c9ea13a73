#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace trireme {

// [Note: what an estimate counts]
//
// An estimate counts tensors that a strategy makes a rank keep, at their largest, in steady state.
// Not counted: the interpreter and torch itself, gradients on their way from a layer to where they
// are kept (at that time activations have gone), memory that an allocator holds beyond its tensors,
// counters and flags of a few bytes per parameter. docs/memory.md has the formulas.

// kFsdp is fully_shard, which the ZeRO paper calls stage 3.
enum class TrainingStrategy : uint8_t { kSingle, kDp, kDdp, kZero1, kZero2, kFsdp };

// Reads "single", "dp", "ddp", "zero1", "zero2", "fsdp" (also "zero3", "fully_shard"). Throws
// ValueError, naming them.
TRIREME_API TrainingStrategy training_strategy(std::string_view name);

enum class MemoryAccounting : uint8_t {
  // This library on CPU: dtypes as they are, parameters once per host where ZeRO can have that,
  // rings of the ranks that share memory, units and buckets of ranks that gather over Gloo.
  kTrireme,
  // Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
  // 2020, section 3: mixed precision with Adam, 2 bytes for a parameter, 2 for its gradient, 12 for
  // its state (with the fp32 copy); each rank on a device of its own, no buffers. The parameters'
  // dtypes are not looked at, and another optimizer is refused.
  kPaper,
};

// Reads "trireme", "paper". Throws ValueError.
TRIREME_API MemoryAccounting memory_accounting(std::string_view name);

// The state of an optimizer for each element of a parameter.
struct OptimizerState {
  // Tensors of the parameter's sizes, in fp32, or in the parameter's dtype if that is wider.
  int64_t tensors = 2;
  // Bytes, in place of `tensors`.
  std::optional<int64_t> bytes = {};
};

// Reads "sgd" 0 tensors, "sgd_momentum" 1, "adam" and "adamw" 2. Throws ValueError.
TRIREME_API OptimizerState optimizer_state(std::string_view name);

struct MemoryRequest {
  // Sizes, numel, dtype and requires_grad are read; a frozen one has no gradient and no state.
  // Parameters that share memory are given once.
  const std::vector<ParameterInfo>& parameters;
  TrainingStrategy strategy = TrainingStrategy::kDdp;
  int64_t world = 1;
  int64_t ranks_per_host = 1;  // ranks of the fullest host
  MemoryAccounting accounting = MemoryAccounting::kTrireme;
  OptimizerState optimizer = {};
  std::optional<at::ScalarType> grad_dtype = {};  // else each parameter's
  // See ZeroOptions. Under kFsdp it is false if ranks share no memory (Gloo): they gather units.
  bool host_params = true;
  // Elements of the largest unit (one call of fully_shard), for kFsdp that gathers; 0: the model is
  // one.
  int64_t unit_numel = 0;
  // Bytes of each rank; under kDp of each replica.
  int64_t activation_bytes = 0;
  int64_t module_buffer_bytes = 0;  // running statistics and such
};

struct MemoryBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t activations = 0;
  // The module's own buffers; rings of ranks that share memory; buckets and gathered units of ranks
  // that do not.
  int64_t buffers = 0;

  int64_t model_states() const { return parameters + gradients + optimizer; }
  int64_t total() const { return model_states() + activations + buffers; }
  bool operator==(const MemoryBytes&) const = default;
};

struct MemoryEstimate {
  MemoryBytes rank;  // the fullest rank, with its share of memory that a host has once
  MemoryBytes host;  // the fullest host: all its ranks (the sum of their PSS)

  bool operator==(const MemoryEstimate&) const = default;
};

// Throws ValueError for contradictory counts, for combinations that no path is built for, and for
// more bytes than 64 bits count. Costs one pass over the parameters, whatever the world.
TRIREME_API MemoryEstimate estimate_memory(const MemoryRequest& request);

// The memory limit: of each host, or, if each rank has memory of its own (a GPU), of each rank.
struct MemoryLimit {
  int64_t bytes = 0;
  bool of_rank = false;
};

TRIREME_API bool fits(const MemoryEstimate& estimate, MemoryLimit limit);

// Returns the fewest ranks for which the estimate fits: request.world, if these are enough, or else
// more hosts of request.ranks_per_host ranks each. Empty if no number is enough, as when every rank
// keeps all. Throws what estimate_memory() throws.
TRIREME_API std::optional<int64_t> fewest_ranks(const MemoryRequest& request, MemoryLimit limit);

}  // namespace trireme
