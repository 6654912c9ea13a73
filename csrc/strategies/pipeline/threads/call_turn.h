#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/common/thread_turn.h>
#include <trireme/strategies/pipeline/runner.h>

#include <memory>
#include <utility>

namespace trireme {

// [Note: calls of several threads]
//
// The batch of a call, and what functions of stages leave behind, belong to the pipeline: so calls,
// and backwards of passes, come one after the other. In one process a call waits for those before
// it. Over ranks no call may wait: threads come in another order on each rank, and ranks would run
// batches that do not belong together. There a call during another one ends both, on all ranks.

// The turn of a call of a pipeline.
class TRIREME_API CallTurn {
 public:
  // `ranks` of a pipeline over ranks; null in one process.
  explicit CallTurn(std::shared_ptr<Communicator> ranks = nullptr) : ranks_(std::move(ranks)) {}

  // Waits for the calls before this one, and lets signal handlers run meanwhile. Throws what
  // expect_call() of a runner does; c10::Error for a call from within another one of this thread,
  // and, over ranks, for a call during another one. Called without the GIL.
  void take(const PipelineRunner* runner);
  void give_back() noexcept { turn_.give_back(); }

  class Guard {
   public:
    Guard(CallTurn& turn, const PipelineRunner& runner) : turn_(turn) { turn_.take(&runner); }
    ~Guard() { turn_.give_back(); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    CallTurn& turn_;
  };

 private:
  std::shared_ptr<Communicator> ranks_;
  ThreadTurn turn_{"pipeline"};
};

}  // namespace trireme
