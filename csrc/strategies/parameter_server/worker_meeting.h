#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/meeting_line.h>
#include <trireme/strategies/parameter_server/progress_table.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme::ps {

// [Note: workers that meet]
//
// Saving, and writing parameters, need all workers to pause: each live worker calls the same
// function. Each counts its phases in a line of its own, and waits until the others have counted as
// far, or are gone. However a worker leaves a meeting, its count ends where the next meeting's
// begins; a worker that leaves by an exception says so first, and then no worker goes on. A worker
// that missed some meetings begins with the latest.

// Lets one worker do some work while the others stand still. Called by the thread that has the
// worker's lock, so that its other threads stand still, too.
class TRIREME_API WorkerMeeting {
 public:
  // The words of errors: how they go on after "save at clock 3: worker 1 (rank 1, process 81)", and
  // what to do.
  struct Texts {
    const char* at_other_clock;  // what to do
    const char* has_failed;
    const char* after_failure;
    const char* has_gone;
    const char* after_end;
  };
  struct Parts {
    std::shared_ptr<ProgressTable> board;
    // Returns a worker's line, in memory that all workers map; zeros at first.
    std::function<MeetingLine&(int64_t worker)> line_of;
    Texts texts;
  };
  explicit WorkerMeeting(Parts parts) : parts_(std::move(parts)) {}

  struct Plan {
    const WaitContext& context;
    bool at_one_clock = true;            // whether all workers have to be
    std::function<void()> prepare = {};  // on each worker, when all have come
    std::function<void()> work = {};     // on the first worker, when all are prepared
    bool works_in_time = false;          // others wait for the work until a deadline
  };
  // Returns when `work` is done. Throws ValueError on all workers if they are at different clocks;
  // DistBackendError if a worker does not come, or if `work` fails, whose worker throws its own
  // error.
  void hold(const Plan& plan);

  // The steps of hold(): begin() has all come and prepare themselves, work() waits until all are
  // prepared. If one throws, or the caller gives up, fail() tells the other workers why; end()
  // follows in any case.
  void begin(const Plan& plan);
  void work(const Plan& plan);
  void fail(std::string_view reason) noexcept;
  void end() noexcept;

 private:
  enum Phase : uint64_t { kCome = 1, kPrepared = 2, kDone = 3 };

  MeetingLine& own_line() const { return parts_.line_of(*parts_.board->worker()); }
  void catch_up();
  void reach(Phase phase) noexcept;
  bool wait_for(int64_t worker, Phase phase, WaitContext context);
  std::vector<int64_t> meet(Phase phase, const WaitContext& context);
  void check_clocks(const std::vector<int64_t>& come, const WaitContext& context);
  void check_failed(const std::vector<int64_t>& come, const WaitContext& context);

  Parts parts_;
  uint64_t meetings_ = 0;
  bool others_failed_ = false;  // another worker has made this meeting fail
};

}  // namespace trireme::ps
