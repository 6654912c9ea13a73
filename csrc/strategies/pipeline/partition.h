#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace trireme {

struct PartitionRequest {
  std::vector<double> costs;  // one per layer, in any unit
  int64_t parts = 1;
  // The bytes of each layer, and those that a part may have: both or neither.
  std::vector<int64_t> memory = {};
  std::optional<int64_t> limit = {};
};

// Cuts layers into consecutive parts, at least one layer in each, so that the largest sum of a part
// is as small as any cut makes it. Returns how many layers each part has:
//
//   costs 1 1 1 1 1 1 1, 3 parts    3 2 2
//   costs 5 1 1 1 1,     2 parts    1 4
//
// Where several cuts are as good, each part in turn takes as nearly an even share of the layers
// that are left as they allow. Costs about 64 passes over the parts, and one over the layers.
//
// Throws ValueError for fewer layers than parts, for invalid costs or bytes, and where no cut keeps
// to the limit; its text says which layer is too large, or how many parts there must be.
TRIREME_API std::vector<int64_t> partition(const PartitionRequest& request);

// Returns the same; nothing where no cut keeps to the limit, though each layer alone does.
TRIREME_API std::optional<std::vector<int64_t>> partition_if_fits(const PartitionRequest& request);

}  // namespace trireme
