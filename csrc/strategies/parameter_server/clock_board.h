#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/common/wait_times.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/shm/liveness.h>
#include <trireme/shm/rank_block.h>
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

// [Note: how a clock closes]
//
// A worker's clock is the number of its clock() calls, in its own line; nobody else writes it.
// Under bsp the shared number `closed` counts the clocks whose pushes may be applied. Whoever comes
// by closes the next one when it can be: when all workers that are there have clocked it, or all
// but `backup`. With whose pushes it was closed follows from the clocks themselves without backup:
// a worker that has left or died keeps the clock it had. With backup a word says it, a bit per
// worker, written by one compare-and-swap before `closed` moves; so all who apply the clock see the
// same workers, and one that is killed in between leaves nothing half done.
//
// [Note: workers that join]
//
// There are more lines than workers. Who joins takes the next one, and is nobody that others wait
// for (kVacant) until it is here, at the clock that is open. A worker that had looked before might
// still close that clock without it; so `closed` counts in its lowest bits who has joined, and who
// closes a clock does it by a compare-and-swap that fails where somebody has joined since it
// looked. A line says with which clock its worker began: those before it were closed without it.

enum class LineState : uint32_t {
  kVacant,  // nobody yet
  kHere,
  kLeft,    // leave() or close()
  kFailed,  // close() on the way out of an exception, which the line names
  kLost     // its process has ended
};

// Says whether a worker in that state may have left something half done.
inline bool has_broken_off(LineState state) {
  return state == LineState::kFailed || state == LineState::kLost;
}

// Is what a rank lets the others see: the one thing of the board that it writes, but for what is
// said of it once it is gone.
struct WorkerLine {
  shm::Bell bell;
  alignas(64) std::atomic<uint64_t> clock;
  std::atomic<uint64_t> awaited;  // clock; kGone once nobody is to wait for it
  std::atomic<LineState> state;
  std::atomic<uint64_t> met;         // how far the worker is in meetings; see worker_meeting.h
  std::atomic<uint64_t> met_failed;  // the last one that failed because of it, counted from 1
  std::array<std::atomic<uint64_t>, 2> met_clock;  // its clock at the last two, by their parity
  std::atomic<uint64_t> first;                     // the clock that it began with
  int32_t pid;
  int32_t rank;                  // in the group; kJoined
  int32_t is_elsewhere;          // on another host: a server of this one writes the line
  std::array<char, 512> reason;  // complete before the state becomes kFailed

  // Leaves a text of this worker for messages of the others, who read it once they know why.
  void leave_word(std::string_view word) noexcept;
  std::string word() const;
  bool has_joined() const { return rank == kJoined; }

  static constexpr uint64_t kGone = UINT64_MAX;
  static constexpr int32_t kJoined = -1;
};

struct BoardHeader {
  static constexpr size_t kTaken = 1024;
  static constexpr int kJoinBits = 8;

  alignas(64) std::atomic<uint64_t> workers;  // lines that are in use
  // Counts the clocks that are closed, times 2^kJoinBits, plus the workers that have joined.
  alignas(64) std::atomic<uint64_t> closed;
  // Says with whose pushes the last kTaken clocks were closed, with backup only.
  alignas(64) std::array<std::atomic<uint64_t>, kTaken> taken;
};

// Describes a wait: for messages and onlookers.
struct Errand {
  std::function<std::string()> text;  // "pull of table 'model'"; asked where it has to wait
  std::string_view cause;             // "pull", "push", "lock", "serve" or "writing", in a literal
  int64_t worker = -1;                // the wait is for this one; -1: for whoever is behind
  uint64_t clock = 0;                 // the one that those have not come to
  bool has_deadline = true;
  bool lets_others_in = false;  // threads of this worker; see worker_lock.h
};

// Says how many lines a board has, and for whom: workers first, those that are there at first
// before those that may join, then ranks that only serve.
struct BoardPlan {
  int64_t workers = 1;       // at first
  int64_t most_workers = 1;  // with those that may join
  int64_t servers = 0;
  bool has_hosts = false;  // servers stand for workers of other hosts, so that all need them

  int64_t lines() const { return most_workers + servers; }
  int64_t bytes() const {
    return static_cast<int64_t>(sizeof(BoardHeader)) +
           lines() * static_cast<int64_t>(sizeof(WorkerLine));
  }
};

// Holds the lines of all workers and servers. The thread that has the worker's lock calls it, but
// for what is const, and for wait() where nobody else uses it.
class TRIREME_API ClockBoard {
 public:
  struct Request {
    std::byte* memory = nullptr;  // BoardPlan::bytes() zeros
    std::shared_ptr<const void> keeps_memory = nullptr;
    Options options;
    BoardPlan plan;
    int64_t line = 0;  // this rank's
    RankOf where;      // in the group; of a worker on another host that of its server
    shm::HostGroup* group = nullptr;  // null for a rank alone, and for a worker on another host
    struct Elsewhere {
      int64_t rank = 0;
      int64_t pid = 0;
    };
    std::optional<Elsewhere> elsewhere = {};  // the worker on another host that this stands for
  };

  // Says that this rank is there. watch_peers() follows once all ranks have said so.
  explicit ClockBoard(Request request);
  // Takes the next line of a board that others use; see [Note: workers that join]. `prepare` is
  // called before others wait for this worker. Throws ValueError where no more workers can join.
  static std::shared_ptr<ClockBoard> join(Request request,
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
  uint64_t closed() const {
    return header().closed.load(std::memory_order_seq_cst) >> BoardHeader::kJoinBits;
  }
  // Says whether nobody is to wait for that worker: it has left, or, under kContinue, died, or is
  // about to join.
  bool is_gone(int64_t worker) const;
  LineState state_of(int64_t worker) const;
  // Says whether a closed clock was closed with the pushes of that worker.
  bool takes(int64_t worker, uint64_t clock) const;

  // Moves the clock of this worker and wakes those who wait for it.
  void set_clock(uint64_t clock);
  // Closes what can be closed, and wakes those who wait for it.
  void close_clocks();
  // Says that nobody has to wait for this worker, or server, any more. Never throws.
  void leave(LineState state, std::string_view reason) noexcept;
  void ring_all() noexcept;
  WorkerLock& worker_lock() { return worker_lock_; }

  // Waits until a counter has come to a number; false if the worker of the errand is gone before.
  // Throws DistBackendError, naming who is missing, at the deadline, and under kRaise when a worker
  // has died or failed; RuntimeError where another thread closes the server; what a signal handler
  // raised.
  bool wait(const std::atomic<uint64_t>& counter, uint64_t target, const Errand& errand);
  bool wait_closed(uint64_t target, const Errand& errand) {
    return wait(header().closed, target << BoardHeader::kJoinBits, errand);
  }
  // Waits until that worker has come to a clock, or is gone.
  void wait_clock(int64_t worker, uint64_t clock, const Errand& errand) {
    wait(line(worker).awaited, clock, errand);
  }
  // Looks at most ten times a second whether a worker has died; throws as wait() does.
  void check_peers(const Errand& errand);
  // These are for who does a thing again and again without a wait. check_deadline() throws as
  // wait() does.
  std::chrono::steady_clock::time_point deadline() const;
  void check_deadline(std::chrono::steady_clock::time_point deadline, const Errand& errand);
  // Lines are numbered as workers are, those of servers behind them.
  WorkerLine& line(int64_t index) const;
  // Returns "worker 1 (rank 1, process 81)", or "worker 2 (joined, process 90)", or "server of rank
  // 2 (process 82)".
  std::string name_of(int64_t worker) const;

  // Sets who tells what a worker that has died held: " while it held block 3 of ...", or nothing.
  void describe_held_by(std::function<std::string(int64_t)> describe) {
    describe_held_ = std::move(describe);
  }
  // Sets what waits do beside, every shm::kLookEvery; what it throws ends them.
  void look_also(std::function<void(const Errand&)> look) { look_also_ = std::move(look); }
  WaitTimes& wait_times() { return wait_times_; }
  const WaitTimes& wait_times() const { return wait_times_; }

 private:
  class LineWatch;
  struct WorkerGone {};
  struct Joins {};
  ClockBoard(Request request, Joins joins);

  BoardHeader& header() const { return *reinterpret_cast<BoardHeader*>(memory_); }
  int64_t claim_line() const;
  uint64_t slowest_clock() const;
  void begin_at_open_clock();
  void watch(int64_t index);
  void watch_all();
  std::vector<int64_t> watched() const;
  bool excuses(LineState state) const;
  bool close_next();
  bool note_ended();
  bool wait_asleep(const std::atomic<uint64_t>& counter, uint64_t target, const Errand& errand);
  std::optional<int64_t> find_lost() const;
  std::string why_gone(int64_t worker) const;
  std::string state_text(int64_t worker) const;
  [[noreturn]] void refuse_without_server(const Errand& errand, int64_t index);
  [[noreturn]] void refuse_lost(const Errand& errand, int64_t worker);
  [[noreturn]] void refuse_late(const Errand& errand);
  std::chrono::milliseconds limit() const;

  std::shared_ptr<const void> keeps_memory_;
  std::byte* memory_;
  Options options_;
  BoardPlan plan_;
  RankOf where_;
  shm::HostGroup* group_;
  int64_t own_;  // the line of this rank
  std::optional<int64_t> memory_kills_;
  // One per line; absent while a worker is about to join, and for those of other hosts.
  std::vector<std::optional<shm::PeerProcess>> processes_;
  WorkerLock worker_lock_;
  std::optional<shm::FlagWait> flag_wait_;
  std::function<std::string(int64_t)> describe_held_;
  shm::Clock::time_point looked_at_;
  WaitTimes wait_times_;
  std::function<void(const Errand&)> look_also_;
};

}  // namespace trireme::ps
