#pragma once

#include <trireme/comm/hosts/group_collectives.h>

#include <ATen/core/Tensor.h>

namespace trireme {

// Sums a sparse COO tensor over the ranks, in place and coalesced: indices and values of all ranks
// are gathered, so the cost grows with the number of ranks and the entries that they do not share.
void all_reduce_sparse(const GroupCollectives& collectives, const at::Tensor& tensor,
                       const shm::CallOptions& options);

}  // namespace trireme
