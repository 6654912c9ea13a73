#include <trireme/comm/backend/sparse.h>

#include <trireme/comm/shm_tensors.h>
#include <trireme/common/resolved.h>

#include <ATen/ATen.h>

#include <vector>

namespace trireme {
namespace {

using Use = ShmTensors::Use;

// Gathers `mine` of every rank behind each other along dim 0; rank r has rows[r] rows.
at::Tensor gather_rows(const GroupCollectives& collectives, const at::Tensor& mine,
                       const std::vector<int64_t>& rows, const shm::CallOptions& options) {
  std::vector<at::Tensor> outputs;
  for (const int64_t count : rows) {
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes[0] = count;
    outputs.push_back(at::empty(sizes, mine.options()));
  }
  collectives.all_gather(ShmTensors(outputs, Use::kWrite).pieces_of_each(),
                         ShmTensors(mine, Use::kRead).pieces(), shm_dtype(mine.scalar_type()),
                         options);
  return at::cat(outputs);
}

}  // namespace

void all_reduce_sparse(const GroupCollectives& collectives, const at::Tensor& tensor,
                       const shm::CallOptions& options) {
  const auto world = static_cast<size_t>(collectives.world());
  const at::Tensor mine = tensor.detach().coalesce();
  // The properties that must agree, and the number of entries of each rank.
  at::Tensor about = at::tensor({mine._nnz(), mine.sparse_dim()}, at::kLong);
  about = at::cat({about, at::tensor(mine.sizes(), at::kLong)});
  std::vector<at::Tensor> abouts;
  for (size_t rank = 0; rank < world; ++rank) abouts.push_back(at::empty_like(about));
  collectives.all_gather(ShmTensors(abouts, Use::kWrite).pieces_of_each(),
                         ShmTensors(about, Use::kRead).pieces(), shm::Dtype::kI64, options);
  std::vector<int64_t> counts;
  for (size_t rank = 0; rank < world; ++rank) {
    counts.push_back(abouts[rank][0].item<int64_t>());
    if (!at::equal(abouts[rank].slice(0, 1), abouts[0].slice(0, 1)))
      collectives.refuse("sparse tensors of different shapes", options);
  }
  // Rows are entries of the tensor, so indices travel transposed.
  const at::Tensor indices =
      gather_rows(collectives, mine.indices().t().contiguous(), counts, options).t();
  const at::Tensor values =
      gather_rows(collectives, resolved(mine.values()).contiguous(), counts, options);
  const at::Tensor sum = at::sparse_coo_tensor(indices, values, mine.sizes(), mine.options());
  copy_over(tensor, sum.coalesce());
}

}  // namespace trireme
