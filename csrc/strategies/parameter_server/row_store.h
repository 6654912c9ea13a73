#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/span.h>
#include <trireme/shm/segment.h>
#include <trireme/strategies/parameter_server/block_lock.h>
#include <trireme/strategies/parameter_server/progress_table.h>
#include <trireme/strategies/parameter_server/row_plan.h>
#include <trireme/strategies/parameter_server/table_spec.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::ps {

// [Note: how rows come into being]
//
// An index of open addressing, in memory of the host, says where the record of an id lies. Looking
// up takes no lock. A worker that makes rows holds one line for the index (BlockLock): it fills a
// record and publishes it by one store, so that other workers see all of it or nothing. An index
// that is half full is copied into the next level, twice as large, which is published likewise; a
// worker that still looks at the old level misses newer rows, and then looks again. A worker that
// dies while it makes a row leaves a record that no lookup finds; one that dies while it copies the
// index leaves a level that is made again.
//
// [Note: a row is never a mixture of two states]
//
// A row has a word: a version, and its holder. A worker that steps a row takes the word by
// compare-and-swap, and stores it with the next version. A reader loads the word, copies, and loads
// it again; if it has changed, it copies once more, and after some tries takes the row like a
// writer. ThreadSanitizer knows nothing of such reads, so there every reader takes the row. Under
// bsp no worker takes rows: a clock is applied when no worker reads.

// The columns of rows, one tensor each, whose first dimension counts rows.
struct RowColumns {
  at::Tensor ids;     // int64
  at::Tensor values;  // [rows, dim]
  at::Tensor steps;   // int64
  std::vector<at::Tensor> states;
};

// Keeps the rows of a sparse table. Called by the thread that has the worker's lock, but for const
// functions that take no row: a row knows the worker that holds it, not the thread.
class TRIREME_API RowStore {
 public:
  struct Parts {
    std::shared_ptr<const TableSpec> spec;
    std::shared_ptr<ProgressTable> board;
    std::shared_ptr<const shm::Segment>
        segment;  // RowPlan::bytes, of which first_bytes() are there
    std::shared_ptr<const void> keeps_memory;
  };
  static constexpr int64_t kNone = -1;

  // `index_line`: its holder makes rows.
  RowStore(Parts parts, RowPlan plan, BlockLine& index_line);

  const RowPlan& plan() const { return plan_; }
  // Sets rows[i] to the row of ids[i], or to kNone.
  void find(const int64_t* ids, int64_t count, int64_t* rows) const;
  // Makes the rows that are kNone, with their first values. Throws DistBackendError if there is no
  // memory; the rows before are made.
  void make(const int64_t* ids, int64_t count, int64_t* rows, const WaitContext& context);

  // Prefetch a row that is read, or stepped, soon: some dozens at a time fit into the nearest
  // cache.
  void fetch_values(int64_t row) const { fetch(row, plan_.states_at); }
  void fetch_record(int64_t row) const { fetch(row, plan_.record_bytes); }

  Span values(int64_t row) const;
  std::byte* state(int64_t row, int64_t state) const;
  // Counts a step of the row, which this worker holds, and returns its number.
  int64_t count_step(int64_t row) const;

  // Copies the values of a row as one of its steps has left them.
  void read(int64_t row, std::byte* to, const WaitContext& context) const;
  // See [Note: a row is never a mixture of two states].
  void acquire(int64_t row, const WaitContext& context) const;
  void release(int64_t row) const;

  // Returns a worker's pushes of a clock; at() turns their offsets into addresses.
  PushHalf& half(int64_t worker, uint64_t clock) const { return line(worker).halves[clock & 1]; }
  std::byte* at(int64_t offset) const { return memory_ + offset; }
  // Returns the offset of `bytes` adjacent bytes for a push of this worker. Throws DistBackendError
  // if there is no memory.
  int64_t claim_push_memory(PushHalf& half, int64_t bytes, const WaitContext& context) const;

  // Returns how many rows there are. Cost: one look at each.
  int64_t size() const;
  // Returns their ids, ascending.
  std::vector<int64_t> ids() const;
  int64_t memory_bytes() const;
  // Returns the number of records without a look at them: rows that a worker died in while it made
  // them are counted, too.
  int64_t count_claimed() const {
    return static_cast<int64_t>(header().claimed.load(std::memory_order_acquire));
  }

  // These are called while all workers stand still. columns() returns views of the records, in the
  // order in which rows were made (copies if a worker died while it made one); clear() forgets all
  // rows.
  RowColumns columns() const;
  void clear();

  // See the functions of TableSteps.
  std::string held_by(int64_t worker) const;
  int64_t count_torn(std::vector<std::string>& names) const;

 private:
  RowsHeader& header() const { return *reinterpret_cast<RowsHeader*>(memory_); }
  RowLine& line(int64_t worker) const {
    return reinterpret_cast<RowLine*>(memory_ + plan_.lines_at)[worker];
  }
  RowRecord& record(int64_t row) const {
    return *reinterpret_cast<RowRecord*>(memory_ + plan_.record_at(row));
  }
  IndexSlot* slots_of(int64_t level) const {
    return reinterpret_cast<IndexSlot*>(memory_ + plan_.level_at(level));
  }
  uint64_t me() const { return static_cast<uint64_t>(*board_->worker()) + 1; }
  bool is_made(int64_t row) const {
    return (record(row).word.load(std::memory_order_acquire) & RowRecord::kMade) != 0;
  }
  int64_t look_up(int64_t id, int64_t level) const;
  void fetch(int64_t row, int64_t bytes) const;
  int64_t add(int64_t id, const WaitContext& context);
  void put(int64_t row, int64_t level) const;
  void grow_index(const WaitContext& context);
  void finish_for_the_dead() const;
  void reserve(int64_t begin, int64_t end, std::string_view what, const WaitContext& context) const;
  [[noreturn]] void refuse_memory(std::string_view what, const WaitContext& context) const;
  std::string name_of(int64_t row) const;
  bool is_lost(uint64_t holder) const;
  void note_torn(int64_t id) const;

  std::shared_ptr<const TableSpec> spec_;
  std::shared_ptr<ProgressTable> board_;
  std::shared_ptr<const shm::Segment> segment_;
  std::shared_ptr<const void> keeps_memory_;
  RowPlan plan_;
  std::byte* memory_;
  BlockLine& index_line_;
  BlockLock lock_;
};

}  // namespace trireme::ps
