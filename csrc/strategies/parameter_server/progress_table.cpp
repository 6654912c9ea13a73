#include <trireme/strategies/parameter_server/progress_table.h>

#include <trireme/common/duration.h>
#include <trireme/common/interruption.h>
#include <trireme/shm/fault.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/shown_wait.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <unistd.h>
#include <utility>

namespace trireme::ps {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPeersEvery{100};
constexpr int kTagShift = static_cast<int>(kMostWithBackup);

// Returns the tag that tells a clock's word from the one that its place held 1024 clocks before.
uint64_t tag_of(uint64_t clock) { return (clock + 1) << kTagShift; }
uint64_t bit_of(int64_t worker) { return uint64_t{1} << worker; }

std::string limit_text(milliseconds limit) {
  const auto ms = limit.count();
  return ms % 1000 == 0 ? c10::str(ms / 1000, " s") : c10::str(ms, " ms");
}

}  // namespace

ProgressTable::ProgressTable(Request request)
    : keeps_memory_(std::move(request.keeps_memory)),
      memory_(request.memory),
      options_(std::move(request.options)),
      plan_(request.plan),
      where_(request.where),
      group_(request.group),
      own_(request.line),
      memory_kills_(shm::out_of_memory_kills()) {
  header().workers.store(static_cast<uint64_t>(plan_.workers), std::memory_order_seq_cst);
  const auto& elsewhere = request.elsewhere;
  line(own_).pid = static_cast<int32_t>(elsewhere ? elsewhere->pid : ::getpid());
  line(own_).rank = static_cast<int32_t>(elsewhere ? elsewhere->rank : where_.rank);
  line(own_).is_elsewhere = elsewhere ? 1 : 0;
  line(own_).state.store(LineState::kHere, std::memory_order_seq_cst);
}

WorkerLine& ProgressTable::line(int64_t index) const {
  return reinterpret_cast<WorkerLine*>(memory_ + sizeof(BoardHeader))[index];
}

// --- joining; see [Note: workers that join] ------------------------------------------------------

ProgressTable::ProgressTable(Request request, Joins /*joins*/)
    : keeps_memory_(std::move(request.keeps_memory)),
      memory_(request.memory),
      options_(std::move(request.options)),
      plan_(request.plan),
      group_(nullptr),
      own_(claim_line()),
      memory_kills_(shm::out_of_memory_kills()) {
  where_ = {own_, own_ + 1};
  line(own_).pid = ::getpid();
  line(own_).rank = WorkerLine::kJoined;
}

std::shared_ptr<ProgressTable> ProgressTable::join(
    Request request, const std::function<void(int64_t worker)>& prepare) {
  const std::shared_ptr<ProgressTable> board(new ProgressTable(std::move(request), Joins{}));
  prepare(board->own_);
  board->begin_at_open_clock();
  board->watch_peers();
  return board;
}

int64_t ProgressTable::claim_line() const {
  std::atomic<uint64_t>& workers = header().workers;
  uint64_t next = workers.load(std::memory_order_seq_cst);
  do {
    TORCH_CHECK_VALUE(
        static_cast<int64_t>(next) < plan_.most_workers,
        error_text(kPsArea,
                   c10::str("join: got ", next, " workers so far, expected fewer than ",
                            plan_.most_workers),
                   {}, "Start the group again, with as many ranks as are wanted."));
  } while (!workers.compare_exchange_weak(next, next + 1, std::memory_order_seq_cst));
  return static_cast<int64_t>(next);
}

// Returns the clock of the slowest live worker; the highest clock if all are gone.
uint64_t ProgressTable::slowest_clock() const {
  std::optional<uint64_t> slowest;
  uint64_t last = 0;
  for (int64_t worker = 0; worker < workers(); ++worker) {
    const uint64_t clock = clock_of(worker);
    last = std::max(last, clock);
    if (!is_gone(worker)) slowest = std::min(slowest.value_or(clock), clock);
  }
  return slowest.value_or(last);
}

void ProgressTable::begin_at_open_clock() {
  WorkerLine& own = line(own_);
  const auto begin_at = [&](uint64_t clock) {
    own.first.store(clock, std::memory_order_seq_cst);
    own.clock.store(clock, std::memory_order_seq_cst);
    own.awaited.store(clock, std::memory_order_seq_cst);
    own.state.store(LineState::kHere, std::memory_order_seq_cst);
  };
  if (options_.mode == Mode::kBsp) {
    commit_clocks();
    uint64_t word = header().committed.load(std::memory_order_seq_cst);
    do {
      begin_at(word >> BoardHeader::kJoinBits);
    } while (
        !header().committed.compare_exchange_strong(word, word + 1, std::memory_order_seq_cst));
  } else {
    begin_at(slowest_clock());
  }
  ring_all();
}

// --- lines ---------------------------------------------------------------------------------------

void ProgressTable::watch_peers() {
  processes_.resize(static_cast<size_t>(plan_.lines()));
  watch_all();
  flag_wait_.emplace(line(own_).futex, plan_.workers + plan_.servers);
}

// Returns the lines of the processes whose end matters: all workers; servers, if they stand for
// other hosts, since no worker can go on without, or under kRaise, which reports every loss.
std::vector<int64_t> ProgressTable::watched() const {
  std::vector<int64_t> lines;
  for (int64_t worker = 0; worker < workers(); ++worker) lines.push_back(worker);
  if (plan_.has_hosts || options_.on_worker_loss == WorkerLoss::kRaise)
    for (int64_t index = plan_.most_workers; index < plan_.lines(); ++index) lines.push_back(index);
  return lines;
}

// Begins to watch a process, unless it is watched already.
void ProgressTable::watch(int64_t index) {
  auto& process = processes_[static_cast<size_t>(index)];
  WorkerLine& one = line(index);
  if (process || state_of(index) != LineState::kHere || one.is_elsewhere != 0) return;
  try {
    process.emplace(one.pid);
  } catch (const shm::Fault& fault) {
    if (!line(index).has_joined()) C10_THROW_ERROR(DistBackendError, fault.what());
    LineState here = LineState::kHere;
    one.state.compare_exchange_strong(here, LineState::kLost, std::memory_order_seq_cst);
  }
}

void ProgressTable::watch_all() {
  for (const int64_t index : watched()) watch(index);
}

std::optional<int64_t> ProgressTable::worker() const {
  if (own_ < plan_.most_workers) return own_;
  return std::nullopt;
}

uint64_t ProgressTable::clock_of(int64_t worker) const {
  return line(worker).clock.load(std::memory_order_seq_cst);
}

LineState ProgressTable::state_of(int64_t worker) const {
  return line(worker).state.load(std::memory_order_seq_cst);
}

// Returns whether others go on without a worker of that state.
bool ProgressTable::excuses(LineState state) const {
  return state == LineState::kLeft ||
         (has_broken_off(state) && options_.on_worker_loss == WorkerLoss::kContinue);
}

bool ProgressTable::is_gone(int64_t worker) const {
  return state_of(worker) == LineState::kVacant ||
         line(worker).awaited.load(std::memory_order_seq_cst) == WorkerLine::kGone;
}

bool ProgressTable::takes(int64_t worker, uint64_t clock) const {
  if (options_.backup == 0)
    return clock_of(worker) > clock && line(worker).first.load(std::memory_order_seq_cst) <= clock;
  const uint64_t word = header().taken[clock % BoardHeader::kTaken].load(std::memory_order_acquire);
  return word >> kTagShift == tag_of(clock) >> kTagShift && (word & bit_of(worker)) != 0;
}

void ProgressTable::set_clock(uint64_t clock) {
  line(own_).clock.store(clock, std::memory_order_seq_cst);
  line(own_).awaited.store(clock, std::memory_order_seq_cst);
  if (options_.mode == Mode::kSsp) ring_all();
}

// See [Note: how a clock is committed].
bool ProgressTable::commit_next() {
  uint64_t before = header().committed.load(std::memory_order_seq_cst);
  const uint64_t clock = before >> BoardHeader::kJoinBits;
  std::atomic<uint64_t>& taken = header().taken[clock % BoardHeader::kTaken];
  uint64_t word = taken.load(std::memory_order_seq_cst);
  if (options_.backup == 0 || word >> kTagShift != tag_of(clock) >> kTagShift) {
    int64_t missing = 0;
    int64_t come = 0;
    uint64_t mask = 0;
    for (int64_t worker = 0; worker < workers(); ++worker) {
      // Reads this before the clock: the clock of a worker that is gone does not change any more.
      const bool gone = is_gone(worker);
      if (clock_of(worker) > clock) {
        ++come;
        mask |= options_.backup == 0 ? 0 : bit_of(worker);
      } else if (!gone) {
        ++missing;
      }
    }
    if (come == 0 || missing > options_.backup) return false;
    if (options_.backup > 0)
      taken.compare_exchange_strong(word, tag_of(clock) | mask, std::memory_order_seq_cst);
  }
  header().committed.compare_exchange_strong(
      before, before + (uint64_t{1} << BoardHeader::kJoinBits), std::memory_order_seq_cst);
  return true;
}

void ProgressTable::commit_clocks() {
  bool any = false;
  while (commit_next()) any = true;
  if (any) ring_all();
}

void ProgressTable::ring_all() noexcept {
  const int64_t workers = this->workers();
  for (int64_t worker = 0; worker < workers; ++worker) shm::ring(line(worker).futex);
  for (int64_t index = plan_.most_workers; index < plan_.lines(); ++index)
    shm::ring(line(index).futex);
}

void ProgressTable::leave(LineState state, std::string_view reason) noexcept {
  WorkerLine& own = line(own_);
  if (own.state.load(std::memory_order_relaxed) != LineState::kHere) return;
  if (!reason.empty()) own.leave_word(reason);
  own.state.store(state, std::memory_order_seq_cst);
  if (excuses(state)) own.awaited.store(WorkerLine::kGone, std::memory_order_seq_cst);
  if (options_.mode == Mode::kBsp) commit_clocks();
  ring_all();
}

void WorkerLine::leave_word(std::string_view word) noexcept {
  size_t length = std::min(word.size(), reason.size() - 1);
  // A character of UTF-8 is not cut: bytes after its first one begin with the bits 10.
  while (length > 0 && length < word.size() && (word[length] & 0xC0) == 0x80) --length;
  std::copy_n(word.begin(), length, reason.begin());
  reason[length] = '\0';
}

std::string WorkerLine::word() const {
  return {reason.data(), ::strnlen(reason.data(), reason.size())};
}

std::string ProgressTable::name_of(int64_t worker) const {
  const WorkerLine& one = line(worker);
  if (worker >= plan_.most_workers)
    return c10::str("server of rank ", one.rank, " (process ", one.pid, ")");
  const std::string from = line(worker).has_joined() ? "joined" : c10::str("rank ", one.rank);
  return c10::str("worker ", worker, " (", from, ", process ", one.pid,
                  one.is_elsewhere != 0 ? ", on another host)" : ")");
}

// Marks the lines of processes that have ended; returns whether it found one.
bool ProgressTable::note_ended() {
  bool found = false;
  watch_all();
  for (const int64_t index : watched()) {
    WorkerLine& one = line(index);
    LineState here = LineState::kHere;
    const auto& process = processes_[static_cast<size_t>(index)];
    if (one.state.load(std::memory_order_acquire) != here || !process || process->alive()) continue;
    one.state.compare_exchange_strong(here, LineState::kLost, std::memory_order_seq_cst);
    found = true;
  }
  // Covers also a worker that was killed between the two stores.
  for (int64_t worker = 0; worker < workers(); ++worker) {
    if (excuses(state_of(worker)) && !is_gone(worker))
      line(worker).awaited.store(WorkerLine::kGone, std::memory_order_seq_cst);
  }
  if (found) ring_all();
  return found;
}

std::optional<int64_t> ProgressTable::find_lost() const {
  const bool goes_on = options_.on_worker_loss == WorkerLoss::kContinue;
  for (const LineState state : {LineState::kFailed, LineState::kLost})
    for (const int64_t index : watched())
      if (state_of(index) == state && (!goes_on || index >= plan_.most_workers)) return index;
  return std::nullopt;
}

std::string ProgressTable::why_gone(int64_t worker) const {
  const uint64_t clock = clock_of(worker);
  if (state_of(worker) == LineState::kFailed)
    return c10::str(" has left at clock ", clock, ", ended by ", line(worker).word());
  if (line(worker).is_elsewhere != 0)
    return c10::str(" has gone at clock ", clock, ": ", line(worker).word());
  const auto& process = processes_[static_cast<size_t>(worker)];
  const auto status = process ? process->wait_status() : std::nullopt;
  if (status == 0) return c10::str(" ended normally at clock ", clock, " without leave()");
  return c10::str(" has died at clock ", clock, shm::text_of_end(status, memory_kills_));
}

void ProgressTable::refuse_without_server(const WaitContext& context, int64_t index) {
  const auto& process = processes_[static_cast<size_t>(index)];
  const auto status = process ? process->wait_status() : std::nullopt;
  std::string how = " has died" + shm::text_of_end(status, memory_kills_);
  if (state_of(index) == LineState::kFailed) {
    how = " was ended by " + line(index).word();
  } else if (status == 0) {
    how = " ended normally without close()";
  }
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea, c10::str(context.text(), ": ", name_of(index), how), where_,
                 plan_.has_hosts ? "Start the group again; what was saved can be loaded."
                                 : "Start the group again; what was saved can be loaded. "
                                   "on_worker_loss='continue' goes on without it."));
}

void ProgressTable::refuse_lost(const WaitContext& context, int64_t worker) {
  if (worker >= plan_.most_workers) refuse_without_server(context, worker);
  const std::string held = describe_held_ ? describe_held_(worker) : std::string();
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea, c10::str(context.text(), ": ", name_of(worker), why_gone(worker), held),
                 where_,
                 state_of(worker) == LineState::kFailed
                     ? "Look for the error of that worker; on_worker_loss='continue' goes on "
                       "without it."
                     : "Start the group again; on_worker_loss='continue' goes on without it."));
}

std::string ProgressTable::state_text(int64_t worker) const {
  if (line(worker).is_elsewhere != 0) return c10::str("; it is at clock ", clock_of(worker));
  const auto& process = processes_[static_cast<size_t>(worker)];
  return c10::str("; it is alive, at clock ", clock_of(worker), " (its process is ",
                  process ? process->state() : "gone", ")");
}

milliseconds ProgressTable::limit() const {
  return options_.timeout.value_or(group_ == nullptr ? kLongestWait : group_->timeout());
}

// Throws, naming the context's worker, or, if it has none, the slowest one.
void ProgressTable::refuse_late(const WaitContext& context) {
  watch_all();
  int64_t late = context.worker;
  for (int64_t worker = 0; worker < workers() && context.worker < 0; ++worker) {
    if (is_gone(worker) || clock_of(worker) >= context.clock) continue;
    if (late < 0 || clock_of(worker) < clock_of(late)) late = worker;
  }
  const std::string who = late < 0 ? std::string("it has not come")
                                   : c10::str(name_of(late), " has not come within ",
                                              limit_text(limit()), state_text(late));
  C10_THROW_ERROR(DistBackendError,
                  error_text(kPsArea, context.text() + ": " + who, where_,
                             "Look what that worker is doing, or raise the timeout."));
}

// Checks, while this rank sleeps, whether the wait can still end.
class ProgressTable::LineWatch final : public shm::Watch {
 public:
  LineWatch(ProgressTable& board, const WaitContext& context) : board_(board), context_(context) {}

  // These take the worker's lock, which the wait may have released.
  bool pointless() override {
    if (board_.worker_lock_.is_ended_here()) return true;
    const std::unique_lock turn(board_.worker_lock_);
    board_.note_ended();
    if (board_.options_.mode == Mode::kBsp) board_.commit_clocks();
    if (board_.find_lost()) return true;
    if (context_.worker >= 0 && board_.is_gone(context_.worker)) return true;
    if (board_.options_.on_worker_loss == WorkerLoss::kContinue || board_.group_ == nullptr)
      return false;
    failure_ = board_.group_->failure();
    return failure_.has_value();
  }
  void look_around() override {
    check_interruption();
    const std::unique_lock turn(board_.worker_lock_);
    if (board_.look_also_) board_.look_also_(context_);
  }
  [[noreturn]] void fail() override {
    if (board_.worker_lock_.is_ended_here() && board_.line(board_.own_).is_elsewhere != 0)
      C10_THROW_ERROR(DistBackendError,
                      error_text(kPsArea, context_.text() + ": its server has stopped",
                                 board_.where_, "Look for the error of that rank."));
    board_.worker_lock_.check_not_ended(context_.text, board_.where_);
    const std::unique_lock turn(board_.worker_lock_);
    if (const auto lost = board_.find_lost()) board_.refuse_lost(context_, *lost);
    if (!failure_) throw WorkerGone{};
    C10_THROW_ERROR(DistBackendError, error_text(kPsArea, context_.text() + ": " + *failure_,
                                                 board_.where_, "Make a new group."));
  }
  [[noreturn]] void overdue() override {
    const std::unique_lock turn(board_.worker_lock_);
    board_.refuse_late(context_);
  }

 private:
  ProgressTable& board_;
  const WaitContext& context_;
  std::optional<std::string> failure_;
};

bool ProgressTable::wait(const std::atomic<uint64_t>& counter, uint64_t target,
                         const WaitContext& context) {
  if (counter.load(std::memory_order_acquire) >= target) return true;
  std::optional<shm::ShownWait> shown;
  if (group_ != nullptr) {
    std::string text = context.text();
    if (context.worker >= 0)
      text += c10::str(" for worker ", context.worker, " at clock ", clock_of(context.worker));
    shown.emplace(group_->block(group_->rank()), text);
  }
  const auto counts = wait_times_.count(context.cause);
  const bool has_come = wait_asleep(counter, target, context);
  // Another thread may have closed the server meanwhile.
  if (context.lets_others_in) worker_lock_.check_not_ended(context.text, where_);
  return has_come;
}

bool ProgressTable::wait_asleep(const std::atomic<uint64_t>& counter, uint64_t target,
                                const WaitContext& context) {
  const milliseconds limit = context.has_deadline ? this->limit() : kLongestWait;
  LineWatch watch(*this, context);
  std::optional<WorkerLock::Gap> gap;
  if (context.lets_others_in) gap.emplace(worker_lock_);
  try {
    flag_wait_->until(counter, target, deadline_after(limit), watch);
    return true;
  } catch (const WorkerGone&) {
    return false;
  }
}

void ProgressTable::check_peers(const WaitContext& context) {
  const auto now = shm::Clock::now();
  if (now - looked_at_ < kPeersEvery) return;
  looked_at_ = now;
  if (note_ended() && options_.mode == Mode::kBsp) commit_clocks();
  if (const auto lost = find_lost()) refuse_lost(context, *lost);
}

std::chrono::steady_clock::time_point ProgressTable::deadline() const {
  return deadline_after(limit());
}

void ProgressTable::check_deadline(std::chrono::steady_clock::time_point deadline,
                                   const WaitContext& context) {
  check_peers(context);
  check_interruption();
  if (shm::Clock::now() < deadline) return;
  C10_THROW_ERROR(DistBackendError,
                  error_text(kPsArea,
                             c10::str(context.text(),
                                      ": others have changed what it reads again and again for ",
                                      limit_text(limit())),
                             where_, "Pull less at a time, or raise the timeout."));
}

}  // namespace trireme::ps
