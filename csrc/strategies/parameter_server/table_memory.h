#pragma once

#include <trireme/strategies/parameter_server/meeting_line.h>
#include <trireme/strategies/parameter_server/table_plan.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace trireme::ps {

// These structs lie in memory that all ranks of a host map. Zeros are an unused table.

// The part that belongs to all workers.
struct alignas(64) TableHeader {
  std::atomic<uint64_t> applied;  // bsp: number of clocks in the values
  std::atomic<uint64_t> claims;   // bsp: clock + 1 in the upper half, the next block in the lower
  std::atomic<double> lr;         // all workers'; bsp: only after save() or load()
  std::atomic<uint64_t> lr_is_set;
};

// The line of one block. A worker that writes values or states of the block has its number in
// `holder`.
struct alignas(64) BlockLine {
  std::atomic<uint64_t> holder;    // worker + 1, above it what it has done; 0: free
  std::atomic<uint64_t> released;  // number of releases
  std::atomic<uint64_t> applied;   // bsp: number of clocks in this block
  std::atomic<uint64_t> steps;     // steps of the optimizer; written by the holder
  std::atomic<uint64_t> torn;      // number of dead holders that were replaced
  std::atomic<uint32_t> waiters;
};

// The learning rate under which a worker has clocked, and the clock since which it holds.
struct LearningRate {
  std::atomic<uint64_t> since;  // clock + 1; 0: never set
  std::atomic<double> value;
};

// The marks that one worker writes. Behind them lie two numbers per tensor: clock + 1 of the
// deposit that each of the two halves holds.
struct alignas(64) WorkerMarks {
  LearningRate lr[2];
  MeetingLine writing;  // see bound_module.h
};

// The addresses of a table's parts. Valid as long as the memory is.
class TableMemory {
 public:
  TableMemory(const TablePlan& plan, std::byte* memory) : plan_(plan), memory_(memory) {}

  TableHeader& header() const { return *reinterpret_cast<TableHeader*>(memory_); }
  BlockLine& block(int64_t index) const {
    return reinterpret_cast<BlockLine*>(memory_ + plan_.blocks_at)[index];
  }
  WorkerMarks& marks(int64_t worker) const {
    return *reinterpret_cast<WorkerMarks*>(memory_ + plan_.marks_at + worker * plan_.mark_bytes);
  }
  // Returns clock + 1 of a tensor's deposit in the half of that clock.
  std::atomic<uint64_t>& deposited(int64_t worker, uint64_t clock, int64_t tensor) const {
    auto* numbers = reinterpret_cast<std::atomic<uint64_t>*>(&marks(worker) + 1);
    return numbers[static_cast<int64_t>(clock & 1) * plan_.tensors + tensor];
  }
  std::byte* deposit(int64_t worker, uint64_t clock, int64_t tensor) const {
    return memory_ + plan_.deposits_at +
           (2 * worker + static_cast<int64_t>(clock & 1)) * plan_.half_bytes +
           plan_.in_half[static_cast<size_t>(tensor)];
  }
  std::byte* state(int64_t state, int64_t tensor) const {
    return memory_ + plan_.state_at[static_cast<size_t>(state * plan_.tensors + tensor)];
  }

 private:
  const TablePlan& plan_;
  std::byte* memory_;
};

}  // namespace trireme::ps
