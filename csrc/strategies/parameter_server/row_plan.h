#pragma once

#include <trireme/common/export.h>

#include <c10/core/ScalarType.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace trireme::ps {

// The layout of a sparse table's memory, in bytes from its beginning. It is a value: equal on all
// ranks.
//
//   header | per worker: its line | levels of the index | records of rows | pushes (bsp only)
//
// These are addresses. Memory is taken as rows come, from the front of each part.
struct RowPlan {
  int64_t dim = 0;
  at::ScalarType dtype = at::kFloat;
  // --- in a record ---
  int64_t values_at = 0;
  int64_t states_at = 0;
  int64_t state_bytes = 0;   // one state's
  int64_t record_bytes = 0;  // a multiple of 64
  // --- in the memory ---
  int64_t lines_at = 0;
  int64_t index_at = 0;
  int64_t levels = 0;
  int64_t records_at = 0;
  int64_t most_rows = 0;
  int64_t pushes_at = 0;
  int64_t push_bytes = 0;  // 0 without deposits
  int64_t bytes = 0;

  // The number of slots of an index level; they lie behind the slots of the levels before.
  static constexpr int64_t kFirstSlots = 1024;
  static constexpr int64_t slots_of(int64_t level) { return kFirstSlots << level; }
  static constexpr int64_t kSlotBytes = 16;
  int64_t level_at(int64_t level) const {
    return index_at + (slots_of(level) - kFirstSlots) * kSlotBytes;
  }
  int64_t record_at(int64_t row) const { return records_at + row * record_bytes; }
  // Returns how much of the memory is in use before a row is made.
  int64_t first_bytes() const { return level_at(1); }

  bool operator==(const RowPlan&) const = default;
};

struct RowPlanRequest {
  int64_t dim = 1;
  at::ScalarType dtype = at::kFloat;
  int64_t states = 0;       // number of optimizer states
  int64_t state_numel = 1;  // elements of one state
  std::optional<int64_t> rows = {};
  int64_t workers = 1;
  bool deposits = false;
  int64_t memory_bytes = 0;  // the machine's: addresses for more are not needed
};

TRIREME_API RowPlan make_row_plan(const RowPlanRequest& request);

// --- what lies there; zeros are a table without rows ---------------------------------------------

struct alignas(64) RowsHeader {
  static constexpr size_t kTornKept = 16;

  std::atomic<uint64_t> claimed;  // records in use or begun
  std::atomic<uint64_t> records_reserved;
  std::atomic<uint64_t> level;                           // the index level that has all rows
  std::atomic<uint64_t> push_bytes;                      // claimed by workers
  std::atomic<uint64_t> other_bytes;                     // reserved for index and pushes
  std::atomic<uint32_t> waiters;                         // for rows
  std::atomic<uint64_t> torn;                            // rows in which workers have died
  std::array<std::atomic<int64_t>, kTornKept> torn_ids;  // the last ones
};

// The place of an id's row. The id is written before the row.
struct IndexSlot {
  std::atomic<uint64_t> row;  // row + 1; 0: no row
  std::atomic<int64_t> id;
};
static_assert(sizeof(IndexSlot) == RowPlan::kSlotBytes);

// The beginning of a record; values and states follow. `word` is version * 2^kVersionShift + kMade
// + worker + 1 of its holder (0: no holder). The version counts writes.
struct RowRecord {
  static constexpr uint64_t kHolderMask = (uint64_t{1} << 16) - 1;
  static constexpr uint64_t kMade = uint64_t{1} << 16;
  static constexpr int kVersionShift = 17;

  std::atomic<uint64_t> word;
  int64_t id;
  uint64_t steps;  // the optimizer's; written by the holder
  uint64_t unused;
};

// A worker's pushes of one clock (bsp): a list of them in extents of memory, each at least as large
// as all before it.
struct PushHalf {
  static constexpr size_t kExtents = 40;
  struct Extent {
    int64_t begin;
    int64_t bytes;
  };

  uint64_t clock;  // clock + 1 of what it holds
  uint64_t pushes;
  int64_t first;    // where the first push lies
  int64_t last;     // where the last one does
  uint64_t extent;  // the one being filled
  int64_t used;     // bytes used of that extent
  uint64_t extents;
  std::array<Extent, kExtents> memory;
};

// The line that one worker writes.
struct alignas(64) RowLine {
  std::atomic<uint64_t> holding;  // row + 1 of the row that it steps
  std::array<PushHalf, 2> halves;
};

}  // namespace trireme::ps
