#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/clock_board.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>

namespace trireme::ps {

// Counts what this worker does, for stats(), which any thread may ask for.
struct WorkerCounts {
  std::atomic<int64_t> pulls{0};
  std::atomic<int64_t> pushes{0};
  std::atomic<int64_t> dropped{0};  // pushes that came for a closed clock
  std::atomic<int64_t> bytes_pulled{0};
  std::atomic<int64_t> bytes_pushed{0};
};

// Says what this rank may do, and which pushes of it were taken. All tables of a server share it.
// Who counts, moves or settles has the worker's lock.
class TRIREME_API WorkerDesk {
 public:
  explicit WorkerDesk(std::shared_ptr<ClockBoard> board);

  WorkerCounts& counts() { return counts_; }
  const WorkerCounts& counts() const { return counts_; }

  // Throws RuntimeError unless this rank works, has not left, and is the process that made the
  // server. `verb`: for the message.
  void check_worker(std::string_view verb) const;
  // Throws it after close() and in a forked child only.
  void check_open(std::string_view verb) const;
  // Takes the worker's lock; see worker_lock.h. In a forked child it takes nothing, since a thread
  // that is not there may hold it.
  [[nodiscard]] std::unique_lock<WorkerLock> turn() const;
  // Take it and check that.
  [[nodiscard]] std::unique_lock<WorkerLock> enter(std::string_view verb) const;
  [[nodiscard]] std::unique_lock<WorkerLock> enter_open(std::string_view verb) const;
  bool is_forked() const;
  void note_left() { has_left_ = true; }
  void note_closed() { has_left_ = is_closed_ = true; }
  bool is_closed() const { return is_closed_; }
  bool has_left() const { return has_left_; }

  // Counts a push that this clock holds; false where the clock was closed without this worker, so
  // that the push is dropped.
  bool count_push();
  // Moves the clock under bsp: by one, or, where it was closed without this worker, to the present.
  void move_clock();
  // Finds out which clocks were closed with the pushes of this worker, and counts those that were
  // not.
  void settle_pushes();

 private:
  std::shared_ptr<ClockBoard> board_;
  WorkerCounts counts_;
  uint64_t forks_;
  std::atomic<bool> has_left_{false};
  std::atomic<bool> is_closed_{false};
  // With backup these count pushes of this clock, and those of clocks of which it is not known yet
  // whether they were closed with them.
  struct ClockPushes {
    uint64_t clock;
    int64_t pushes;
  };
  int64_t open_pushes_ = 0;
  std::deque<ClockPushes> unsettled_;
};

}  // namespace trireme::ps
