#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/strategies/parameter_server/id_places.h>
#include <trireme/strategies/parameter_server/table_spec.h>

#include <cstdint>
#include <vector>

namespace trireme::ps {

// [Note: a table on several hosts]
//
// Each host keeps a share of each table in its memory, with the clocks of all workers. Workers of a
// host use its share as if it were the whole table; for workers of other hosts a rank that serves
// there does so (shard_server.h), on request by messages. A worker's messages arrive in order, so
// each share sees its pushes and clocks in that order, and commits clocks by itself: the guarantees
// of a pull hold for every share, and so for the table.

// The part of a dense tensor that a host keeps: rows of its first dimension, or all of it.
struct TableShare {
  int64_t tensor = 0;
  int64_t host = 0;
  int64_t first = 0;  // row
  int64_t rows = 0;
  bool is_whole = true;

  bool operator==(const TableShare&) const = default;
};

// Cuts tensors by hosts; returns the shares in the order of tensors, and of a tensor in that of
// hosts. Each host keeps about as many elements; a tensor that is no larger than a block, or has
// fewer rows than there are hosts, is not cut. The result is equal on all ranks.
TRIREME_API std::vector<TableShare> cut_tensors(const std::vector<ParameterInfo>& tensors,
                                                int64_t hosts);

// Returns the host that keeps the row of an id.
inline int64_t host_of(int64_t id, int64_t hosts) {
  return static_cast<int64_t>((hash_of(id) >> 33) % static_cast<uint64_t>(hosts));
}

// The partition of a table over hosts.
struct TableLayout {
  std::vector<ParameterInfo> tensors = {};  // of the whole table; none for a sparse one
  std::vector<TableShare> shares = {};      // of all hosts
  int64_t hosts = 1;
  int64_t own_host = 0;

  std::vector<TableShare> own_shares = {};  // of this host

  std::vector<TableShare> shares_of(int64_t host) const;
};
TRIREME_API TableLayout layout_of(const TableSpec& table, int64_t hosts, int64_t own_host);

// Returns this host's share of a table, without values: tensors by their names, with as many rows
// as its shares have. The share of a single host is the table itself.
TRIREME_API TableSpec share_of(const TableSpec& table, const TableLayout& layout);
// Returns the names, shapes and dtypes of a dense table's tensors.
std::vector<ParameterInfo> infos_of(const TableSpec& table);
// Returns the rows of a share, as a view.
at::Tensor rows_of(const at::Tensor& tensor, const TableShare& share);

}  // namespace trireme::ps
