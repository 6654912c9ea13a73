#pragma once

#include <trireme/strategies/parameter_server/table_plan.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace trireme::ps {

// What follows lies in memory that all ranks of a host map. Zeros are a table that nobody has used.

// Belongs to all workers.
struct alignas(64) TableHeader {
  std::atomic<uint64_t> applied;  // bsp: so many clocks are in the values
  std::atomic<uint64_t> claims;   // bsp: clock + 1 in the upper half, the next block in the lower
  std::atomic<double> lr;         // all workers'; bsp: only after save() or load()
  std::atomic<uint64_t> lr_is_set;
};

// Belongs to one block. Who writes values or states of a block has its number in `holder`.
struct alignas(64) BlockLine {
  std::atomic<uint64_t> holder;    // worker + 1; 0: nobody
  std::atomic<uint64_t> released;  // how often it was let go
  std::atomic<uint64_t> applied;   // bsp: so many clocks are in this block
  std::atomic<uint64_t> steps;     // steps of the optimizer; written by the holder
  std::atomic<uint64_t> torn;      // how often a holder has died
  std::atomic<uint32_t> waiters;
};

// Says under which learning rate a worker has clocked, and since which clock that holds.
struct LearningRate {
  std::atomic<uint64_t> since;  // clock + 1; 0: never set
  std::atomic<double> value;
};

// Is written by one worker. Behind it lie two numbers per tensor: clock + 1 of the deposit that
// each of the two halves holds.
struct alignas(64) WorkerMarks {
  LearningRate lr[2];
  std::atomic<uint64_t> writing;    // how far the worker is in sections of writing
  std::atomic<uint64_t> abandoned;  // the last section that it left by an exception
  // Clocks at which it began the last two sections, by their parity: it may begin the next one
  // before others have looked.
  std::atomic<uint64_t> writing_clock[2];
};

// Finds what belongs to a table. Valid as long as the memory is.
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
  // Returns clock + 1 of what the half of that clock holds of a tensor.
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
