#pragma once

#include <trireme/common/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme {

// Parameters, by their indices, that travel together, in their order.
using Fragment = std::vector<size_t>;

// Cuts parameters of these bytes, in their order, into `count` runs of about equal bytes, none of
// them empty. The same on all ranks. Throws ValueError for more runs than parameters.
TRIREME_API std::vector<Fragment> cut_by_bytes(const std::vector<int64_t>& bytes, int64_t count);

// Deals parameters of these bytes to `ranks` ranks, so that these have about equal bytes: returns
// for each parameter its rank. The same on all ranks.
TRIREME_API std::vector<int64_t> deal_by_bytes(const std::vector<int64_t>& bytes, int64_t ranks);

}  // namespace trireme
