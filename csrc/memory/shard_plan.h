#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// Elements [begin, begin + numel) of a parameter, in row-major order. An empty one is {0, 0}.
struct ShardRange {
  int64_t begin = 0;
  int64_t numel = 0;

  bool operator==(const ShardRange&) const = default;
};

// The rows of a rank by torch.chunk's rule: of n rows rank r has `most` = ceil(n / world) from r *
// most on; later ranks may have fewer or none.
struct ChunkRows {
  int64_t first = 0;
  int64_t count = 0;
  int64_t most = 0;  // of any rank
};

TRIREME_API ChunkRows chunk_rows(int64_t rows, RankOf where);

enum class ShardPlacement : uint8_t {
  // Splits rows, by chunk_rows(), so that state dicts are those of FSDP2. A scalar is rank 0's.
  kDim0,
  // Splits all elements of all parameters, laid end to end in the order given, into equal runs; a
  // run ends at a multiple of 16 elements. Elements are counted, not bytes, so ranks differ in
  // bytes if dtypes differ.
  kFlat,
  // Gives each parameter to one rank, for optimizers that need whole matrices. Balanced by bytes:
  // the largest first, to the rank that has least; between equal parameters the earlier one,
  // between equal ranks the lower one.
  kWhole,
};

// Which rank owns which elements. It is a value: equal on all ranks of a group. The shards of a
// parameter are disjoint, ascend with the rank (kDim0, kFlat) and together are the parameter.
struct ShardPlan {
  int64_t world = 1;
  ShardPlacement placement = ShardPlacement::kDim0;
  std::vector<std::vector<ShardRange>> shards;  // [parameter][rank]

  TRIREME_API const ShardRange& of(int64_t parameter, int64_t rank) const;
  bool operator==(const ShardPlan&) const = default;
};

struct ShardPlanRequest {
  const std::vector<ParameterInfo>& parameters;  // their sizes, numel and dtype are read
  int64_t world;
  ShardPlacement placement;
};

// Throws ValueError for a world below 1. Costs parameters * world.
TRIREME_API ShardPlan make_shard_plan(const ShardPlanRequest& request);

// Returns one line per rank: bytes, and the first and last parameter of which it owns elements,
// e.g.
//   rank 0: 1049600 bytes of 12 parameters: block.0.fc1.weight .. head.weight
TRIREME_API std::string to_string(const ShardPlan& plan,
                                  const std::vector<ParameterInfo>& parameters);

// Returns the sizes of the tensor that holds one shard: under kDim0 {rows, the other sizes...} (a
// scalar keeps its {} on rank 0), under kFlat {numel}, under kWhole those of the parameter. An
// empty shard has {0, the other sizes...} under kDim0, else {0}; a parameter of no elements keeps
// its sizes on every rank (not under kFlat).
TRIREME_API std::vector<int64_t> shard_sizes(const ParameterInfo& parameter,
                                             const ShardRange& range, ShardPlacement placement);

// Where parameters lie in a store that all ranks of a host map: one after the other in the order
// given, each at a multiple of 64 bytes, so that a cache line or vector never holds two of them.
struct StoreLayout {
  std::vector<int64_t> offsets;  // bytes, by parameter
  int64_t bytes = 0;             // bytes of the whole store, a multiple of 64

  bool operator==(const StoreLayout&) const = default;
};

TRIREME_API StoreLayout make_store_layout(const std::vector<ParameterInfo>& parameters);

}  // namespace trireme
