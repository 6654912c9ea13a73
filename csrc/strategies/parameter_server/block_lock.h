#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/progress_table.h>
#include <trireme/strategies/parameter_server/table_memory.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace trireme::ps {

// Lets one worker at a time hold what a BlockLine stands for. The holder's number is in the line,
// so that a worker that waits for a dead holder can name it, and under kContinue take its place.
class TRIREME_API BlockLock {
 public:
  explicit BlockLock(std::shared_ptr<ProgressTable> board) : board_(std::move(board)) {}

  // Takes a line that nobody holds, or whose holder has died under kContinue; returns whether it
  // did. `before`: the holder's word that was there; 0 if nobody held the line.
  bool try_acquire(BlockLine& line, uint64_t& before) const;
  // Releases a line and wakes the workers that wait for it. `done`, which is written before
  // anything else, says what the holder has done; under bsp it is how many clocks are in the block.
  void release(BlockLine& line, uint64_t done) const;
  // Waits until the holder has released the line or is gone. `name` names the block in messages.
  void wait_for_holder(BlockLine& line, const WaitContext& context,
                       const std::function<std::string()>& name) const;
  // Returns whether that worker holds the line and has not said that it is done.
  static bool is_held_by(const BlockLine& line, int64_t worker);
  // Returns whether the holder died before it was done.
  bool is_torn(const BlockLine& line) const;
  // Returns what the holder had done, by its word; 0 for nothing.
  static uint64_t done_in(uint64_t holder);

 private:
  std::shared_ptr<ProgressTable> board_;
};

}  // namespace trireme::ps
