#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/host_store.h>
#include <trireme/strategies/parameter_server/clock_board.h>
#include <trireme/strategies/parameter_server/table_memory.h>
#include <trireme/strategies/parameter_server/table_spec.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme::ps {

// [Note: who steps a block]
//
// Who writes a block holds it: its number is in `holder`, put there by compare-and-swap. Under bsp
// workers that come to a closed clock count through the blocks by one shared counter, so that each
// gets others; then they look for blocks that are still behind, which they step or wait for. The
// counter only spreads the work: who steps a block is decided by `holder`, and whether it is to be
// stepped by its own number of applied clocks, so nothing is lost with a worker that has counted
// and died. Under ssp and async who pushes steps every block, beginning at a place of its own.
//
// A holder that has stepped says so in the upper bits of `holder` before anything else. One that
// dies before that leaves a torn block: some of its elements have been stepped. Under kContinue who
// meets it takes it over, counts it as torn and leaves it as it is.

// Steps the values of a table with what workers push. Called by the thread that uses the server,
// but for what is const.
class TRIREME_API TableSteps {
 public:
  struct Parts {
    std::shared_ptr<const TableSpec> spec;
    std::shared_ptr<ClockBoard> board;
    std::shared_ptr<HostStore> store;  // the values
    std::byte* memory = nullptr;       // TablePlan::bytes zeros, for all else
    std::shared_ptr<const void> keeps_memory;
  };
  TableSteps(Parts parts, TablePlan plan);

  const TablePlan& plan() const { return plan_; }
  const TableMemory& memory() const { return memory_; }
  // Returns the values, over the store.
  const std::vector<at::Tensor>& values() const { return values_; }

  // --- bsp ---

  // Returns how many clocks are in the values.
  uint64_t applied() const { return memory_.header().applied.load(std::memory_order_acquire); }
  // Waits until so many clocks are closed and applied, and applies what is closed.
  void bring_to(uint64_t clocks, const Errand& errand);
  // Applies what is closed, as far as no other worker is at it.
  void apply_closed();
  // Puts `gradients` (one per tensor, or undefined) times `scale` into the half of this clock,
  // which must be free: bring_to(clock - 1).
  void deposit(const std::vector<at::Tensor>& gradients, double scale);
  // Waits, where a learning rate was set in this clock or the one before, until its place is free;
  // called before the clock moves.
  void carry_learning_rate(const Errand& errand);

  // --- ssp and async ---

  // Steps the values with `gradients` times `scale`, one block after the other.
  void step_now(const std::vector<at::Tensor>& gradients, double scale, const Errand& errand);

  // Under bsp from this clock on, else from now on.
  void set_learning_rate(double lr, const Errand& errand);

  // Returns " while it held block 3 of table 'model' ('0.weight')", or nothing.
  std::string held_by(int64_t worker) const;
  // Returns how many blocks holders have left torn, and names them.
  int64_t count_torn(std::vector<std::string>& names) const;

 private:
  // Says how a closed clock is applied: the same for all who do it.
  struct ClockStep {
    uint64_t clock = 0;
    double lr = 0;
    int64_t divisor = 1;
    std::vector<int64_t> taken;
  };
  class Waiting;

  uint64_t me() const { return static_cast<uint64_t>(*board_->worker()) + 1; }
  int64_t count_blocks() const { return static_cast<int64_t>(plan_.blocks.size()); }
  ClockStep step_of(uint64_t clock) const;
  bool apply(uint64_t clock, const Errand* errand);
  int64_t claim(uint64_t clock);
  bool try_apply(int64_t block, const ClockStep& step);
  void step_block(int64_t block, const ClockStep& step);
  bool take(BlockLine& line, uint64_t& holder);
  void let_go(BlockLine& line, uint64_t done);
  void wait_for_holder(int64_t block, const Errand& errand);
  OptimizerSegment segment_of(int64_t block) const;
  std::string name_of(int64_t block) const;

  std::shared_ptr<const TableSpec> spec_;
  std::shared_ptr<ClockBoard> board_;
  std::shared_ptr<HostStore> store_;
  std::shared_ptr<const void> keeps_memory_;
  TablePlan plan_;
  TableMemory memory_;
  std::vector<at::Tensor> values_;  // over the store
  uint64_t lr_since_ = 0;           // what this worker has set: clock + 1, 0 for nothing
  double lr_ = 0;
};

}  // namespace trireme::ps
