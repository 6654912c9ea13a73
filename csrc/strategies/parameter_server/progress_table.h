#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/common/wait_times.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/shm/liveness.h>
#include <trireme/shm/rank_block.h>
#include <trireme/strategies/parameter_server/meeting_line.h>
#include <trireme/strategies/parameter_server/options.h>
#include <trireme/strategies/parameter_server/worker_lock.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::shm {
class HostGroup;
}

namespace trireme::ps {

// [Note: how a clock is committed]
//
// A worker's clock is the number of its clock() calls, in its own line; no other worker writes it.
// Under bsp the shared number `committed` counts the clocks whose pushes may be applied. Any worker
// commits the next clock once all live workers have clocked it, or all but `backup`. Without backup
// the workers' clocks say whose pushes are in it: a worker that has left or died keeps the clock it
// had. With backup a word says so, a bit per worker, written by one compare-and-swap before
// `committed` moves; so all workers that apply the clock see the same pushes, and a worker that is
// killed in between leaves nothing half done.
//
// [Note: workers that join]
//
// There are more lines than workers. A worker that joins takes the next line, and no other worker
// waits for it (kVacant) until it is here, at the open clock. A worker that looked before might
// still commit that clock without it. So `committed` counts the joined workers in its lowest bits,
// and a clock is committed by a compare-and-swap that fails if a worker has joined since. A line
// says with which clock its worker began: earlier clocks were committed without it.

enum class LineState : uint32_t {
  kVacant,  // no worker yet
  kHere,
  kLeft,    // leave() or close()
  kFailed,  // close() on the way out of an exception, which the line names
  kLost     // its process has ended
};

// Returns whether a worker in that state may have left something half done.
inline bool has_broken_off(LineState state) {
  return state == LineState::kFailed || state == LineState::kLost;
}

// The cache lines that one worker, or serving rank, writes and all others read. Once it is gone,
// others may set `state` and `awaited`.
struct WorkerLine {
  shm::Futex futex;
  alignas(64) std::atomic<uint64_t> clock;
  std::atomic<uint64_t> awaited;  // clock; kGone once nobody waits for the worker
  std::atomic<LineState> state;
  MeetingLine saving;
  std::atomic<uint64_t> first;  // the worker's first clock
  int32_t pid;
  int32_t rank;                  // in the group; kJoined
  int32_t is_elsewhere;          // on another host: a server of this one writes the line
  std::array<char, 512> reason;  // complete before the state becomes kFailed

  // Leaves a text for the other workers' messages, which they read once the line says why.
  void leave_word(std::string_view word) noexcept;
  std::string word() const;
  bool has_joined() const { return rank == kJoined; }

  static constexpr uint64_t kGone = UINT64_MAX;
  static constexpr int32_t kJoined = -1;
};

struct BoardHeader {
  static constexpr size_t kTaken = 1024;
  static constexpr int kJoinBits = 8;

  alignas(64) std::atomic<uint64_t> workers;  // lines in use
  // The number of committed clocks, times 2^kJoinBits, plus the number of workers that have joined.
  alignas(64) std::atomic<uint64_t> committed;
  // The workers whose pushes are in each of the last kTaken clocks, with backup only.
  alignas(64) std::array<std::atomic<uint64_t>, kTaken> taken;
};

// The description of a wait, for messages and onlookers.
struct WaitContext {
  std::function<std::string()> text;  // "pull of table 'model'"; called if it has to wait
  std::string_view cause;             // a literal: "pull", "push", "lock", "save", "serve", ...
  int64_t worker = -1;                // the worker waited for; -1: all workers that are behind
  uint64_t clock = 0;                 // the clock that they have not reached
  bool has_deadline = true;
  bool lets_others_in = false;  // threads of this worker; see worker_lock.h
};

// The numbers of lines of a board, in their order: first workers, workers that may join, ranks that
// only serve.
struct BoardPlan {
  int64_t workers = 1;       // at first
  int64_t most_workers = 1;  // with workers that may join
  int64_t servers = 0;
  bool has_hosts = false;  // servers stand for workers of other hosts: no worker can do without

  int64_t lines() const { return most_workers + servers; }
  int64_t bytes() const {
    return static_cast<int64_t>(sizeof(BoardHeader)) +
           lines() * static_cast<int64_t>(sizeof(WorkerLine));
  }
};

// Holds the lines of all workers and servers. Non-const functions are called by the thread that has
// the worker's lock; wait() also without it, where no other thread uses the board.
class TRIREME_API ProgressTable {
 public:
  struct Request {
    std::byte* memory = nullptr;  // BoardPlan::bytes() zeros
    std::shared_ptr<const void> keeps_memory = nullptr;
    Options options;
    BoardPlan plan;
    int64_t line = 0;                 // this rank's
    RankOf where;                     // in the group; for a worker on another host its server's
    shm::HostGroup* group = nullptr;  // null for a rank alone, and for a worker on another host
    struct Elsewhere {
      int64_t rank = 0;
      int64_t pid = 0;
    };
    std::optional<Elsewhere> elsewhere = {};  // the worker on another host that this stands for
  };

  // Marks this rank's line as here. watch_peers() follows once all ranks have marked theirs.
  explicit ProgressTable(Request request);
  // Takes the next line of a board in use; see [Note: workers that join]. `prepare` is called
  // before others wait for this worker. Throws ValueError if no more workers can join.
  static std::shared_ptr<ProgressTable> join(Request request,
                                             const std::function<void(int64_t worker)>& prepare);
  // Throws DistBackendError where a process cannot be watched.
  void watch_peers();

  const Options& options() const { return options_; }
  RankOf where() const { return where_; }
  // Returns how many workers there are or have been; it grows as workers join.
  int64_t workers() const {
    return static_cast<int64_t>(header().workers.load(std::memory_order_seq_cst));
  }
  // Returns the number of this worker; absent on a rank that only serves.
  std::optional<int64_t> worker() const;

  uint64_t clock() const { return line(own_).clock.load(std::memory_order_relaxed); }
  uint64_t clock_of(int64_t worker) const;
  uint64_t committed() const {
    return header().committed.load(std::memory_order_seq_cst) >> BoardHeader::kJoinBits;
  }
  // Returns whether nobody waits for that worker: it has left, or, under kContinue, died, or is
  // about to join.
  bool is_gone(int64_t worker) const;
  LineState state_of(int64_t worker) const;
  // Returns whether a committed clock includes the pushes of that worker.
  bool takes(int64_t worker, uint64_t clock) const;

  // Sets the clock of this worker, and under ssp wakes all others.
  void set_clock(uint64_t clock);
  // Commits all clocks that can be, and wakes the workers that wait for them.
  void commit_clocks();
  // Marks this worker, or server, as gone, so that nobody waits for it any more. Never throws.
  void leave(LineState state, std::string_view reason) noexcept;
  void ring_all() noexcept;
  WorkerLock& worker_lock() { return worker_lock_; }

  // Waits until a counter reaches a number; returns false if the context's worker is gone before.
  // Throws DistBackendError, naming the missing worker, at the deadline, and under kRaise when a
  // worker has died or failed; RuntimeError if another thread closes the server; what a signal
  // handler raised.
  bool wait(const std::atomic<uint64_t>& counter, uint64_t target, const WaitContext& context);
  bool wait_committed(uint64_t target, const WaitContext& context) {
    return wait(header().committed, target << BoardHeader::kJoinBits, context);
  }
  // Waits until that worker has reached a clock, or is gone.
  void wait_clock(int64_t worker, uint64_t clock, const WaitContext& context) {
    wait(line(worker).awaited, clock, context);
  }
  // Checks, at most ten times a second, whether a worker has died; throws as wait() does.
  void check_peers(const WaitContext& context);
  // A deadline for a loop that repeats a read without a wait. check_deadline() throws as wait()
  // does.
  std::chrono::steady_clock::time_point deadline() const;
  void check_deadline(std::chrono::steady_clock::time_point deadline, const WaitContext& context);
  // Lines are numbered as workers are, those of servers behind them.
  WorkerLine& line(int64_t index) const;
  // Returns "worker 1 (rank 1, process 81)", or "worker 2 (joined, process 90)", or "server of rank
  // 2 (process 82)".
  std::string name_of(int64_t worker) const;

  // Sets the function that says what a dead worker held: " while it held block 3 of ...", or
  // nothing.
  void describe_held_by(std::function<std::string(int64_t)> describe) {
    describe_held_ = std::move(describe);
  }
  // Sets a function that waits call every shm::kLookEvery; an exception of it ends the wait.
  void look_also(std::function<void(const WaitContext&)> look) { look_also_ = std::move(look); }
  WaitTimes& wait_times() { return wait_times_; }
  const WaitTimes& wait_times() const { return wait_times_; }

 private:
  class LineWatch;
  struct WorkerGone {};
  struct Joins {};
  ProgressTable(Request request, Joins joins);

  BoardHeader& header() const { return *reinterpret_cast<BoardHeader*>(memory_); }
  int64_t claim_line() const;
  uint64_t slowest_clock() const;
  void begin_at_open_clock();
  void watch(int64_t index);
  void watch_all();
  std::vector<int64_t> watched() const;
  bool excuses(LineState state) const;
  bool commit_next();
  bool note_ended();
  bool wait_asleep(const std::atomic<uint64_t>& counter, uint64_t target,
                   const WaitContext& context);
  std::optional<int64_t> find_lost() const;
  std::string why_gone(int64_t worker) const;
  std::string state_text(int64_t worker) const;
  [[noreturn]] void refuse_without_server(const WaitContext& context, int64_t index);
  [[noreturn]] void refuse_lost(const WaitContext& context, int64_t worker);
  [[noreturn]] void refuse_late(const WaitContext& context);
  std::chrono::milliseconds limit() const;

  std::shared_ptr<const void> keeps_memory_;
  std::byte* memory_;
  Options options_;
  BoardPlan plan_;
  RankOf where_;
  shm::HostGroup* group_;
  int64_t own_;  // the line of this rank
  std::optional<int64_t> memory_kills_;
  // One per line; absent while a worker is about to join, and for workers of other hosts.
  std::vector<std::optional<shm::PeerProcess>> processes_;
  WorkerLock worker_lock_;
  std::optional<shm::FlagWait> flag_wait_;
  std::function<std::string(int64_t)> describe_held_;
  shm::Clock::time_point looked_at_;
  WaitTimes wait_times_;
  std::function<void(const WaitContext&)> look_also_;
};

}  // namespace trireme::ps
