#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::ps {

// Adjacent elements of one tensor, which are locked and stepped together.
struct TableBlock {
  int64_t tensor = 0;
  int64_t begin = 0;
  int64_t numel = 0;

  bool operator==(const TableBlock&) const = default;
};

// The layout of a table's memory, in bytes from its beginning: each part at a multiple of 64. It is
// a value: equal on all ranks. The table's values lie in a HostStore.
//
//   header | a line per block | per worker: marks | states, one after the other
//          | per worker: two halves of deposits (bsp only)
//
// It has room for all workers that may come; the memory of absent workers is not reserved.
struct TablePlan {
  std::vector<TableBlock> blocks;
  int64_t lines = 0;  // one per block
  int64_t tensors = 0;
  int64_t blocks_at = 0;
  int64_t marks_at = 0;
  int64_t mark_bytes = 0;              // one worker's
  std::vector<int64_t> state_at = {};  // [state * tensors + tensor]
  int64_t states_begin = 0;
  int64_t states_end = 0;
  int64_t deposits_at = 0;
  int64_t half_bytes = 0;             // one half of one worker; 0 without deposits
  std::vector<int64_t> in_half = {};  // offset of a tensor in a half
  int64_t bytes = 0;

  // Returns how much of the memory that number of workers uses.
  int64_t used_bytes(int64_t workers) const {
    return marks_at + states_end - states_begin + workers * (mark_bytes + 2 * half_bytes);
  }
};

struct TablePlanRequest {
  const std::vector<ParameterInfo>& tensors;
  int64_t states = 0;  // per element
  int64_t workers = 1;
  bool deposits = false;
};

// The most elements of a block: 128 KiB of fp32, which stays in a core's own cache.
inline constexpr int64_t kBlockNumel = 32768;

// Rounds up to whole lines of a processor's cache.
constexpr int64_t in_lines(int64_t bytes) {
  constexpr int64_t kLineBytes = 64;
  return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

TRIREME_API TablePlan make_table_plan(const TablePlanRequest& request);
// Makes the plan of a sparse table, whose rows lie elsewhere: a line for each of `shares` of the
// rows, and one more for the worker that makes rows.
TRIREME_API TablePlan make_sparse_table_plan(int64_t shares, int64_t workers);
// Returns one line per block: "block 3: '0.weight'[32768, 40000)".
TRIREME_API std::string to_string(const TablePlan& plan, const std::vector<ParameterInfo>& tensors);

}  // namespace trireme::ps
