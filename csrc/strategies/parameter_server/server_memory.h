#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/shm/segment.h>
#include <trireme/strategies/parameter_server/hosts/table_shares.h>
#include <trireme/strategies/parameter_server/options.h>
#include <trireme/strategies/parameter_server/progress_table.h>
#include <trireme/strategies/parameter_server/row_plan.h>
#include <trireme/strategies/parameter_server/table_plan.h>
#include <trireme/strategies/parameter_server/table_spec.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme::ps {

// The layout of a server's memory on a host. It is a value: equal on all ranks of the host and on
// workers that join.
struct TRIREME_API ServerPlan {
  // `all`: this host's shares of the tables; `layouts`: the places of all shares.
  ServerPlan(std::vector<TableSpec> all, std::vector<TableLayout> layouts, const Options& options,
             BoardPlan lines, int64_t machine_bytes);
  // Plans tables of one host.
  ServerPlan(std::vector<TableSpec> all, const Options& options, BoardPlan lines,
             int64_t machine_bytes);

  Options options;
  BoardPlan board;
  int64_t machine_bytes;  // the machine's; addresses for more are not needed
  std::vector<std::shared_ptr<const TableSpec>> specs;  // one per table, like the next three
  std::vector<TableLayout> layouts;
  std::vector<TablePlan> tables;
  std::vector<RowPlan> rows;  // empty for dense tables
  std::vector<int64_t>
      bytes;  // sizes of the segments: the board's, then one per table for its values

  int64_t ranks() const { return board.workers + board.servers; }
};

// Returns the size of this machine's memory in bytes.
int64_t memory_of_machine();

// The memory of a server on one host. One segment holds the board and, behind it, the tables' data
// beside their values; each table has a segment for its values or rows. Addresses are planned for
// all workers that may come; pages are reserved as workers and rows come.
class TRIREME_API ServerMemory {
 public:
  // Collective: the first rank of a host makes its segments, the others open them, and each
  // reserves its part, and the memory that only `workers` write: itself, or the workers that it
  // serves. Throws DistBackendError on all ranks if one cannot.
  static std::shared_ptr<const ServerMemory> share(ServerPlan plan,
                                                   const std::vector<int64_t>& workers,
                                                   Communicator& communicator);
  // Opens the segments of addresses(), in a process of the same host. Throws DistBackendError.
  static std::shared_ptr<const ServerMemory> open(ServerPlan plan,
                                                  const std::vector<std::string>& addresses);

  const ServerPlan& plan() const { return plan_; }
  // Returns where other processes find the segments as long as this one lives; empty if this host
  // does not let them.
  std::vector<std::string> addresses() const;
  // Reserves the memory that only this worker writes. Throws DistBackendError.
  void reserve_worker(int64_t worker, RankOf where) const;

  std::byte* board() const { return segments_.front().segment->data(); }
  // Returns the memory of a table's TablePlan.
  std::byte* table(size_t table) const;
  // Returns the segment that holds a table's values or rows.
  std::shared_ptr<const shm::Segment> values(size_t table) const {
    return segments_[table + 1].segment;
  }
  // Returns a handle that keeps forked children from writing into that segment.
  std::shared_ptr<const void> keeps(size_t table) const { return segments_[table + 1].keeps; }

 private:
  struct Shared {
    std::shared_ptr<shm::Segment> segment;
    std::shared_ptr<const void> keeps;  // destroyed first
  };

  explicit ServerMemory(ServerPlan plan) : plan_(std::move(plan)) {}
  void take(shm::Segment segment);
  std::string make_all(shm::SegmentKind kind);
  std::string open_all(const std::vector<std::string>& addresses);
  std::string reserve_part(int64_t part, int64_t parts, bool is_first) const;
  std::string try_reserve_worker(int64_t worker) const;
  std::string name_of(size_t segment) const;

  ServerPlan plan_;
  std::vector<Shared> segments_;
};

}  // namespace trireme::ps
