#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/clock_board.h>
#include <trireme/strategies/parameter_server/table_memory.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace trireme::ps {

// Lets one worker at a time hold what a BlockLine stands for. The holder's number is in the line,
// so that who waits for one that has died can say so, and under kContinue take its place.
class TRIREME_API BlockLock {
 public:
  explicit BlockLock(std::shared_ptr<ClockBoard> board) : board_(std::move(board)) {}

  // Takes a line that nobody holds, or whose holder has died where the others go on. `before`: the
  // word that was there; 0 if nobody held it.
  bool try_take(BlockLine& line, uint64_t& before) const;
  // Lets it go and wakes who waits. `done` says what the holder has done, before anything else is
  // written; under bsp it is how many clocks are in the block.
  void let_go(BlockLine& line, uint64_t done) const;
  // Returns when the holder has let go, or is gone. `name` is that of the block, for messages.
  void wait_for_holder(BlockLine& line, const Errand& errand,
                       const std::function<std::string()>& name) const;
  // Says whether that worker has the line and has not said that it is done.
  static bool is_held_by(const BlockLine& line, int64_t worker);
  // Says whether the holder has died before it was done.
  bool is_torn(const BlockLine& line) const;
  // Returns what the holder of a word had done; 0 for nothing.
  static uint64_t done_in(uint64_t holder);

 private:
  std::shared_ptr<ClockBoard> board_;
};

}  // namespace trireme::ps
