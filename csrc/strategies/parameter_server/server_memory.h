#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/shm/segment.h>
#include <trireme/strategies/parameter_server/clock_board.h>
#include <trireme/strategies/parameter_server/hosts/table_shares.h>
#include <trireme/strategies/parameter_server/options.h>
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

// Says what a server keeps in the memory of a host, and where. It is a value: equal on all ranks of
// the host and on workers that join.
struct TRIREME_API ServerPlan {
  // `layouts`: where the shares of these tables are, of which `all` are those of this host.
  ServerPlan(std::vector<TableSpec> all, std::vector<TableLayout> layouts, const Options& options,
             BoardPlan lines, int64_t machine_bytes);
  // Plans tables of one host.
  ServerPlan(std::vector<TableSpec> all, const Options& options, BoardPlan lines,
             int64_t machine_bytes);

  Options options;
  BoardPlan board;
  int64_t machine_bytes;  // the machine has; nobody needs addresses for more
  std::vector<std::shared_ptr<const TableSpec>> specs;  // one per table, like the next three
  std::vector<TableLayout> layouts;
  std::vector<TablePlan> tables;
  std::vector<RowPlan> rows;  // are empty for dense tables
  std::vector<int64_t>
      bytes;  // sizes of the segments: the board has one, and each table one for its values

  int64_t ranks() const { return board.workers + board.servers; }
};

// Returns the bytes of the memory of this machine.
int64_t memory_of_machine();

// Is the memory of a server on one host. A segment holds the board, and behind it what tables have
// beside their values; each table has one for its values or rows. Addresses are planned for all
// workers that may come; pages are reserved as workers and rows come.
class TRIREME_API ServerMemory {
 public:
  // Collective: the first rank of a host makes its segments, the others open them, and each
  // reserves its part, and what `workers` write alone: itself, or those that it stands for. Throws
  // DistBackendError on all ranks where one cannot.
  static std::shared_ptr<const ServerMemory> share(ServerPlan plan,
                                                   const std::vector<int64_t>& workers,
                                                   Communicator& communicator);
  // Opens what addresses() says, in a process of the same host. Throws DistBackendError.
  static std::shared_ptr<const ServerMemory> open(ServerPlan plan,
                                                  const std::vector<std::string>& addresses);

  const ServerPlan& plan() const { return plan_; }
  // Returns where other processes find the segments as long as this one lives; nothing where this
  // host does not let them.
  std::vector<std::string> addresses() const;
  // Reserves what a worker writes alone. Throws DistBackendError.
  void reserve_worker(int64_t worker, RankOf where) const;

  std::byte* board() const { return segments_.front().segment->data(); }
  // Returns the memory of a table's TablePlan.
  std::byte* table(size_t table) const;
  // Returns what holds its values or rows.
  std::shared_ptr<const shm::Segment> values(size_t table) const {
    return segments_[table + 1].segment;
  }
  // Keeps forked children from writing into it.
  std::shared_ptr<const void> keeps(size_t table) const { return segments_[table + 1].keeps; }

 private:
  struct Shared {
    std::shared_ptr<shm::Segment> segment;
    std::shared_ptr<const void> keeps;  // goes first
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
