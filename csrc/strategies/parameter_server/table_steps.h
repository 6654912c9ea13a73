#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/span.h>
#include <trireme/strategies/parameter_server/block_lock.h>
#include <trireme/strategies/parameter_server/progress_table.h>
#include <trireme/strategies/parameter_server/table_memory.h>
#include <trireme/strategies/parameter_server/table_spec.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// [Note: who steps a block]
//
// A table is cut into blocks: adjacent elements of a dense table, a share of the ids of a sparse
// one. A worker that writes a block holds its line (BlockLock). Under bsp workers that apply a
// committed clock claim blocks by one shared counter, so that each gets different ones; then they
// look for blocks that are still behind, which they step or wait for. The counter only spreads the
// work: a block's holder word decides which worker steps it, and its own number of applied clocks
// whether it needs a step. So if a worker dies after claiming a block, another worker applies it.
// Under ssp and async a push steps at once: every block of a dense table, each worker beginning at
// another one, or the rows of a sparse one, each of which has a word of its own.
//
// A holder that has stepped says so in its word before anything else. One that dies before that
// leaves a torn block: some of its elements may have been stepped. Under kContinue the next worker
// that needs the block takes it over, counts it as torn and leaves it as it is.

// Applies committed clocks to a table; subclasses define the step of a block. Non-const functions
// are called by the thread that has the worker's lock.
class TRIREME_API TableSteps {
 public:
  struct Parts {
    std::shared_ptr<const TableSpec> spec;
    std::shared_ptr<ProgressTable> board;
    std::byte* memory = nullptr;  // TablePlan::bytes zeros
    std::shared_ptr<const void> keeps_memory;
  };
  TableSteps(Parts parts, TablePlan plan);
  virtual ~TableSteps();
  TableSteps(const TableSteps&) = delete;
  TableSteps& operator=(const TableSteps&) = delete;

  const TablePlan& plan() const { return plan_; }
  const TableMemory& memory() const { return memory_; }

  // --- bsp ---

  // Returns how many clocks are in the values.
  uint64_t applied() const { return memory_.header().applied.load(std::memory_order_acquire); }
  // Waits until so many clocks are committed and applied, and applies what is committed. Lets other
  // threads of this worker in.
  void bring_to(uint64_t clocks, const WaitContext& context);
  // Applies committed clocks, until another worker holds a block that it needs.
  void apply_committed();
  // Publishes this worker's learning rate; called before the clock moves. If it was set in one of
  // the last three clocks, waits until its place is free.
  void carry_learning_rate(const WaitContext& context);

  // Sets the learning rate: under bsp from this clock on, else from now on.
  void set_learning_rate(double lr, const WaitContext& context);

  // Makes the latest learning rate that workers have published the rate of all.
  void adopt_learning_rate();
  // Returns the rate of all, in the table's memory: an fp64 scalar.
  at::Tensor learning_rate() const;
  // Forgets the rate that this worker has set: the rate of all holds.
  void forget_learning_rate();

  // Returns " while it held block 3 of table 'model' ('0.weight')", or nothing.
  virtual std::string held_by(int64_t worker) const;
  // Returns how many blocks holders have left torn, and names them.
  virtual int64_t count_torn(std::vector<std::string>& names) const;

 protected:
  // The step of a committed clock, equal on all workers that apply it.
  struct ClockStep {
    uint64_t clock = 0;
    double lr = 0;
    int64_t divisor = 1;
    std::vector<int64_t> taken;
  };

  const TableSpec& spec() const { return *spec_; }
  ProgressTable& board() const { return *board_; }
  const BlockLock& lock() const { return lock_; }
  int64_t count_blocks() const { return plan_.lines; }
  // Returns the rate that was set for all workers, else the optimizer's own.
  double learning_rate_now() const;
  void set_learning_rate_of_all(double lr);
  // Waits until this worker holds a block, and counts it as torn if its holder has died.
  void take_block(int64_t block, const WaitContext& context);
  // Makes the step of a clock in a block that this worker holds. Neither waits nor throws.
  virtual void step_block(int64_t block, const ClockStep& step) = 0;
  virtual std::string name_of(int64_t block) const = 0;
  static void divide(Span sums, int64_t divisor);

 private:
  ClockStep step_of(uint64_t clock) const;
  bool apply(uint64_t clock, const WaitContext* context);
  int64_t claim(uint64_t clock);
  bool try_apply(int64_t block, const ClockStep& step);
  void wait_for_holder(int64_t block, const WaitContext& context) const;

  std::shared_ptr<const TableSpec> spec_;
  std::shared_ptr<ProgressTable> board_;
  std::shared_ptr<const void> keeps_memory_;
  TablePlan plan_;
  TableMemory memory_;
  BlockLock lock_;
  uint64_t lr_since_ = 0;  // clock + 1 at which this worker set lr_; 0: never
  double lr_ = 0;
};

}  // namespace trireme::ps
