#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/progress_table.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// [Note: workers that meet]
//
// Saving needs all workers to pause: each live worker calls the same function. Each counts its
// phases in its own line, and waits until the others have counted as far, or are gone. However a
// worker leaves a meeting, its count ends where the next meeting's begins; a worker that leaves by
// an exception says so first, and then no worker goes on. A worker that missed some meetings begins
// with the latest.

// Lets one worker do some work while the others stand still. Called by the thread that has the
// worker's lock, so that its other threads stand still, too.
class TRIREME_API WorkerMeeting {
 public:
  explicit WorkerMeeting(std::shared_ptr<ProgressTable> board) : board_(std::move(board)) {}

  struct Plan {
    const WaitContext& context;
    bool at_one_clock = true;            // whether all workers have to be
    std::function<void()> prepare = {};  // on each worker, when all have come
    std::function<void()> work = {};     // on the first worker, when all are prepared
  };
  // Returns when `work` is done. Throws ValueError on all workers if they are at different clocks;
  // DistBackendError if a worker does not come, or if `work` fails, whose worker throws its own
  // error.
  void hold(const Plan& plan);

 private:
  enum Phase : uint64_t { kCome = 1, kPrepared = 2, kDone = 3 };
  class Section;

  std::vector<int64_t> wait_for_all(Phase phase, const WaitContext& context);
  void catch_up();
  void check_failed(const std::vector<int64_t>& come, const WaitContext& context);
  void work(const Plan& plan, int64_t first);
  void check_clocks(const std::vector<int64_t>& come, const WaitContext& context);

  std::shared_ptr<ProgressTable> board_;
  uint64_t meetings_ = 0;
};

}  // namespace trireme::ps
