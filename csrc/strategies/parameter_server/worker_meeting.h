#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/clock_board.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// [Note: workers that meet]
//
// Nothing of a server is collective, but some things want all workers to stand still: then all that
// are there call the same verb. Each counts its phases in its own line, and waits until the others
// have counted as far, or are gone. Whatever way a worker leaves a meeting, its count ends where
// that of the next meeting begins; who leaves it by an exception says so first, and then nobody
// goes on. A worker that did not come to some meetings begins with the latest.

// Lets one worker do something while the others stand still. Called by the thread that has the
// worker's lock, so that its other threads stand still, too.
class TRIREME_API WorkerMeeting {
 public:
  explicit WorkerMeeting(std::shared_ptr<ClockBoard> board) : board_(std::move(board)) {}

  struct Plan {
    const Errand& errand;
    bool at_one_clock = true;            // all have to be
    std::function<void()> prepare = {};  // each worker does it, when all have come
    std::function<void()> work = {};     // the first of them does it, when all are prepared
  };
  // Returns when `work` is done. Throws ValueError on all workers where they are at different
  // clocks; DistBackendError where a worker does not come, or the one that works fails: there its
  // own error comes out.
  void hold(const Plan& plan);

 private:
  enum Phase : uint64_t { kCome = 1, kPrepared = 2, kDone = 3 };
  class Section;

  std::vector<int64_t> wait_for_all(Phase phase, const Errand& errand);
  void catch_up();
  void check_failed(const std::vector<int64_t>& come, const Errand& errand);
  void work(const Plan& plan, int64_t first);
  void check_clocks(const std::vector<int64_t>& come, const Errand& errand);

  std::shared_ptr<ClockBoard> board_;
  uint64_t meetings_ = 0;
};

}  // namespace trireme::ps
