#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::ps {

// Names adjacent elements of one tensor, which are locked and stepped together.
struct TableBlock {
  int64_t tensor = 0;
  int64_t begin = 0;
  int64_t numel = 0;

  bool operator==(const TableBlock&) const = default;
};

// Says where in the memory of a host what belongs to a table lies, in bytes from its beginning:
// each part at a multiple of 64. It is a value: equal on all ranks. The values themselves lie in a
// HostStore.
//
//   header | a line per block | per worker: marks | states, one after the other
//          | per worker: two halves of deposits (bsp only)
//
// Workers are all that may come: the memory of those who do not is not reserved.
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
  std::vector<int64_t> in_half = {};  // where a tensor lies in a half
  int64_t bytes = 0;

  // Returns how much of it so many workers use.
  int64_t used_bytes(int64_t workers) const {
    return marks_at + states_end - states_begin + workers * (mark_bytes + 2 * half_bytes);
  }
};

struct TablePlanRequest {
  const std::vector<ParameterInfo>& tensors;
  int64_t states = 0;  // how many there are per element
  int64_t workers = 1;
  bool deposits = false;
};

// A block has at most so many elements: 128 KiB of fp32, which stays in a core's own cache.
inline constexpr int64_t kBlockNumel = 32768;

// Rounds up to whole lines of a processor's cache.
constexpr int64_t in_lines(int64_t bytes) {
  constexpr int64_t kLineBytes = 64;
  return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

TRIREME_API TablePlan make_table_plan(const TablePlanRequest& request);
// Makes that of a sparse table, whose rows lie elsewhere: lines for `shares` of them, and behind
// these one for who makes rows.
TRIREME_API TablePlan make_sparse_table_plan(int64_t shares, int64_t workers);
// Returns one line per block: "block 3: '0.weight'[32768, 40000)".
TRIREME_API std::string to_string(const TablePlan& plan, const std::vector<ParameterInfo>& tensors);

}  // namespace trireme::ps
