#pragma once

#include <trireme/kernels/span.h>

#include <strategies/parameter_server/ps_ranks.h>
#include <vector>

namespace trireme::test {

constexpr int64_t kDim = 5;
using Ids = std::vector<int64_t>;

inline at::Tensor to_ids(const Ids& ids) { return at::tensor(ids, at::kLong); }

inline ps::TableSpec items(ps::Optimizer optimizer, ps::SparseOptions options = {}) {
  return ps::sparse("items", kDim, std::move(optimizer), options);
}

inline at::Tensor first_values(const ps::SparseOptions& options, int64_t id, int64_t dim = kDim) {
  at::Tensor row = at::empty({dim}, options.dtype);
  ps::fill_row(options.init, options.seed, id, span_of(row));
  return row;
}

}  // namespace trireme::test
