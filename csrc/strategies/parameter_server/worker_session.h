#pragma once

#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/strategies/parameter_server/progress_table.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>

namespace trireme::ps {

// The counts of this worker's work, for stats(), which any thread may call.
struct WorkerCounts {
  std::atomic<int64_t> pulls{0};
  std::atomic<int64_t> pushes{0};
  std::atomic<int64_t> dropped{0};  // pushes of clocks committed without this worker
  std::atomic<int64_t> bytes_pulled{0};
  std::atomic<int64_t> bytes_pushed{0};
};

// Checks what this rank may do, and knows which of its pushes were taken. All tables of a server
// share it. A thread that counts or moves has the worker's lock.
class TRIREME_API WorkerSession {
 public:
  explicit WorkerSession(std::shared_ptr<ProgressTable> board);

  WorkerCounts& counts() { return counts_; }
  const WorkerCounts& counts() const { return counts_; }

  // Throws RuntimeError unless this rank works, has not left, and is the process that made the
  // server. `verb`: for the message.
  void check_worker(std::string_view verb) const;
  // Throws RuntimeError after close() and in a forked child only.
  void check_open(std::string_view verb) const;
  // Takes the worker's lock; see worker_lock.h. In a forked child it takes nothing, since a thread
  // of the parent may hold it.
  [[nodiscard]] std::unique_lock<WorkerLock> turn() const;
  // Take the lock, and check as check_worker() and check_open() do.
  [[nodiscard]] std::unique_lock<WorkerLock> enter(std::string_view verb) const;
  [[nodiscard]] std::unique_lock<WorkerLock> enter_open(std::string_view verb) const;
  bool is_forked() const;
  void note_left() { has_left_ = true; }
  void note_closed() { has_left_ = is_closed_ = true; }
  bool is_closed() const { return is_closed_; }
  bool has_left() const { return has_left_; }

  // Counts a push of this clock; returns false if the clock was committed without this worker, so
  // that the push is dropped.
  bool count_push();
  // Moves the clock: by one, or, if it was committed without this worker, to the present one.
  void move_clock();
  // Finds out which clocks were committed without this worker, and counts their pushes as dropped.
  void count_dropped();

 private:
  std::shared_ptr<ProgressTable> board_;
  WorkerCounts counts_;
  ForkGuard fork_guard_;
  std::atomic<bool> has_left_{false};
  std::atomic<bool> is_closed_{false};
  // With backup: the pushes of this clock, and those of earlier clocks that are not committed yet.
  struct ClockPushes {
    uint64_t clock;
    int64_t pushes;
  };
  int64_t open_pushes_ = 0;
  std::deque<ClockPushes> undecided_;
};

}  // namespace trireme::ps
