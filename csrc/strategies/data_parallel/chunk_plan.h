#pragma once

#include <trireme/common/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme {

// The rows of a batch that one replica works on.
struct Chunk {
  size_t replica = 0;
  int64_t rows = 0;

  bool operator==(const Chunk&) const = default;
};

// Returns which replica gets how many of `rows` consecutive rows, in their order: as torch.chunk
// cuts them for `replicas`, equal but for the last, and fewer chunks where rows run out:
//
//   7 rows, 3 replicas   0 0 0 1 1 1 2        4 rows, 3 replicas   0 0 1 1
//
// No rows at all are one empty chunk.
TRIREME_API std::vector<Chunk> even_chunks(int64_t rows, size_t replicas);

// Cuts rows in proportion to `weights`, one finite number >= 0 per replica, not all 0. A replica of
// weight 0 gets nothing, any other at least one row while there are enough; where there are not,
// the heaviest get one each:
//
//   8 rows, weights 3 1      0 0 0 0 0 0 1 1
//   8 rows, weights 1 0 3    0 0 2 2 2 2 2 2
//   1 row,  weights 1 3      1
//
// Rounded by the largest remainder. Throws ValueError for other weights.
TRIREME_API std::vector<Chunk> weighted_chunks(int64_t rows, const std::vector<double>& weights);

// Cuts `rows` of another tensor of the same batch, for the replicas that `chunks` names and in
// their proportion, at least one row each. Throws ValueError where there are fewer.
TRIREME_API std::vector<int64_t> rows_like(const std::vector<Chunk>& chunks, int64_t rows);

}  // namespace trireme
