// How a wait of a host group ends without the awaited counter: which rank is missing, and what all
// then report.

#include <trireme/common/duration.h>
#include <trireme/common/interruption.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/shown_wait.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <unistd.h>

namespace trireme::shm {
namespace {

std::string seconds(std::chrono::milliseconds duration) {
  const auto ms = duration.count();
  return ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms";
}

template <size_t N>
std::string_view text_at(const std::array<char, N>& place) {
  return {place.data(), ::strnlen(place.data(), place.size())};
}

}  // namespace

// Looks while a rank sleeps: first whether another one has left a message, which says more than its
// silence, then whether the awaited one still lives.
class HostGroup::PeerWatch : public Watch {
 public:
  // Watches for the collective that runs if there is no context.
  PeerWatch(HostGroup& group, int64_t peer, const WaitContext* context, bool rejoins = false)
      : group_(group), peer_(peer), context_(context), rejoins_(rejoins) {}

  bool pointless() override {
    if (group_.failure()) return true;
    why_ = group_.absence_of(peer_);
    return !why_.empty() || !left_by().empty();
  }

  // Abandons the wait if this thread was interrupted.
  void look_around() override {
    try {
      check_interruption();
    } catch (const Interruption& interruption) {
      group_.abandon(error_text("host_group", what() + ": " + interruption.reason, group_.where_,
                                "Look for the error of that rank."));
      throw;
    }
  }

  void fail() override {
    if (group_.failure()) group_.check_usable();
    // A message left before its death tells more than the death.
    if (const std::string left = left_by(); !left.empty())
      group_.throw_fault(FaultKind::kAbandoned, what(), left);
    group_.wait_for_exit(peer_);
    miss(FaultKind::kPeerLost, group_.absence_of(peer_));
  }

  void overdue() override {
    const auto patience = context_ != nullptr ? context_->timeout : group_.timeout_;
    const std::string why = group_.lateness_of(peer_, "come", patience);
    if (context_ != nullptr && context_->spares_group) {
      throw Fault(FaultKind::kTimeout, error_text("host_group", what() + ": " + why, group_.where_,
                                                  "Wait longer; the group goes on."));
    }
    miss(FaultKind::kTimeout, why);
  }

 protected:
  [[noreturn]] virtual void miss(FaultKind kind, const std::string& why) {
    group_.throw_fault(kind, what(), why);
  }

 private:
  std::string what() const {
    return context_ != nullptr ? std::string(context_->name) : group_.current();
  }

  // Returns which rank, of those that this wait depends on, has ended this epoch, and why.
  std::string left_by() const { return rejoins_ ? std::string() : group_.left_by(peer_); }

  HostGroup& group_;
  int64_t peer_;
  const WaitContext* context_;
  bool rejoins_;
  std::string why_;
};

// Reports the missing rank to its caller, which then looks for the next.
class HostGroup::RollCallWatch final : public PeerWatch {
 public:
  RollCallWatch(HostGroup& group, int64_t peer) : PeerWatch(group, peer, nullptr) {}
  struct Missing {
    FaultKind kind;
    std::string why;
  };

 private:
  [[noreturn]] void miss(FaultKind kind, const std::string& why) override {
    throw Missing{kind, why};
  }
};

void HostGroup::roll_call() {
  enter();
  FaultKind kind = FaultKind::kPeerLost;
  std::string why;
  for (int64_t peer = 0; peer < world(); ++peer) {
    if (peer == rank_) continue;
    RollCallWatch watch(*this, peer);
    try {
      flag_wait_->until(block(peer).entered, sequence_, deadline_, watch);
    } catch (const RollCallWatch::Missing& missing) {
      if (missing.kind == FaultKind::kTimeout) kind = missing.kind;
      why += (why.empty() ? "" : "; ") + missing.why;
    }
  }
  if (!why.empty()) throw_fault(kind, current(), why);
}

void HostGroup::wait(int64_t peer, Counter counter, uint64_t target) {
  PeerWatch watch(*this, peer, nullptr);
  flag_wait_->until(block(peer).*counter, target, deadline_, watch);
}

void HostGroup::wait_beside(int64_t peer, const std::atomic<uint64_t>& counter, uint64_t target,
                            const WaitContext& context) {
  if (counter.load(std::memory_order_acquire) >= target) return;
  PeerWatch watch(*this, peer, &context);
  const ShownWait shown(block(rank_), context.name);
  flag_wait_->until(counter, target, deadline_after(context.timeout), watch);
}

void HostGroup::wait_all(Counter counter, uint64_t target) {
  for (int64_t peer = 0; peer < world(); ++peer)
    if (peer != rank_) wait(peer, counter, target);
}

void HostGroup::check_usable() {
  if (fork_guard_.in_child()) {
    throw Fault(FaultKind::kForked,
                error_text("host_group",
                           "got a collective in a forked child of the process that made the "
                           "group",
                           where_, "Use the group in the parent only; a child may only read."));
  }
  if (const auto failed = failure()) throw Fault(FaultKind::kAborted, *failed);
}

std::optional<std::string> HostGroup::failure() {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!failure_.empty()) return failure_;
  for (size_t peer = 0; peer < blocks_.size(); ++peer) {
    RankBlock& block = *blocks_[peer];
    if (block.state.load(std::memory_order_acquire) != RankState::kFailed) continue;
    const size_t length = ::strnlen(block.failure.data(), block.failure.size());
    failure_ = error_text("host_group",
                          "the group has failed: rank " + std::to_string(members_[peer]) +
                              " says: " + std::string(block.failure.data(), length),
                          where_, "Make a new group, without the rank that failed.");
    return failure_;
  }
  return std::nullopt;
}

void HostGroup::fail(const std::string& text) noexcept {
  if (blocks_.empty() || fork_guard_.in_child()) return;
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  RankBlock& own = block(rank_);
  // A rank that has left has given its reason.
  const RankState state = own.state.load(std::memory_order_relaxed);
  if (state == RankState::kFailed || state == RankState::kLeft) return;
  const size_t length = std::min(text.size(), own.failure.size() - 1);
  std::memcpy(own.failure.data(), text.data(), length);
  own.failure[length] = '\0';
  own.state.store(RankState::kFailed, std::memory_order_seq_cst);
  ring_all();
}

bool HostGroup::has_abandoned() const {
  const RankBlock& own = *blocks_[static_cast<size_t>(rank_)];
  return own.abandoned.load(std::memory_order_acquire) >= epoch();
}

std::string HostGroup::why_abandoned() const {
  const RankBlock& own = *blocks_[static_cast<size_t>(rank_)];
  return {own.reason.data(), ::strnlen(own.reason.data(), own.reason.size())};
}

std::string HostGroup::left_by(int64_t peer) const {
  const uint64_t epoch = this->epoch();
  for (const int64_t rank : {peer, rank_}) {
    const RankBlock& block = *blocks_[static_cast<size_t>(rank)];
    if (block.abandoned.load(std::memory_order_acquire) < epoch) continue;
    const size_t length = ::strnlen(block.reason.data(), block.reason.size());
    return name_of(rank) + " has left it: " + std::string(block.reason.data(), length);
  }
  return {};
}

void HostGroup::abandon(const std::string& reason) noexcept {
  if (blocks_.empty() || fork_guard_.in_child()) return;
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (has_abandoned()) return;
  RankBlock& own = block(rank_);
  const size_t length = std::min(reason.size(), own.reason.size() - 1);
  std::memcpy(own.reason.data(), reason.data(), length);
  own.reason[length] = '\0';
  own.abandoned.store(epoch(), std::memory_order_seq_cst);
  ring_all();
}

// See [Note: abandoned work]. A rank that comes again after a wait here failed publishes the same
// values again, so that a rank for which the earlier message was enough and one that waits for the
// later one come to the same number.
void HostGroup::rejoin() {
  const uint64_t epoch = this->epoch() + 1;
  RankBlock& own = block(rank_);
  own.last_sequence.store(sequence_, std::memory_order_relaxed);
  own.last_ring_attempt.store(ring_attempts_, std::memory_order_relaxed);
  own.had_rings.store(has_rings(), std::memory_order_relaxed);
  own.rejoined.store(epoch, std::memory_order_seq_cst);
  wake_peers();
  const WaitContext context{"the first collective after work was abandoned", timeout_};
  for (int64_t peer = 0; peer < world(); ++peer) {
    if (peer == rank_) continue;
    PeerWatch watch(*this, peer, &context, /*rejoins=*/true);
    flag_wait_->until(block(peer).rejoined, epoch, deadline_, watch);
  }
  for (RankBlock* peer : blocks_) {
    sequence_ = std::max(sequence_, peer->last_sequence.load(std::memory_order_relaxed));
    ring_attempts_ =
        std::max(ring_attempts_, peer->last_ring_attempt.load(std::memory_order_relaxed));
    if (!peer->had_rings.load(std::memory_order_relaxed)) rings_.clear();
  }
  epoch_.store(epoch, std::memory_order_release);
}

void HostGroup::ring_all() noexcept {
  for (RankBlock* peer : blocks_) {
    ring(peer->futex);
    ring(peer->mail_futex);
  }
}

void HostGroup::throw_fault(FaultKind kind, const std::string& what, const std::string& why) {
  const std::string_view next_step = kind == FaultKind::kPeerLost ? advice_on_absence()
                                     : kind == FaultKind::kAbandoned
                                         ? "The next step works, if every rank goes on to it."
                                         : "Look what that rank is doing, or raise the timeout.";
  const std::string text = error_text("host_group", what + ": " + why, where_, next_step);
  if (kind == FaultKind::kAbandoned) {
    abandon(text);
    throw Fault(kind, text);
  }
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    failure_ = text;
  }
  fail(text);
  throw Fault(kind, text);
}

std::string HostGroup::name_of(int64_t peer) const {
  const auto index = static_cast<size_t>(peer);
  return "rank " + std::to_string(members_[index]) + " (process " +
         std::to_string(blocks_[index]->pid) + ")";
}

std::string HostGroup::absence_of(int64_t peer) const {
  const auto index = static_cast<size_t>(peer);
  const RankBlock& block = *blocks_[index];
  const bool left = block.state.load(std::memory_order_acquire) == RankState::kLeft;
  if (!left && processes_[index].alive()) return {};
  std::string how =
      " has died" + step_of(peer) +
      text_of_end(left ? std::nullopt : processes_[index].wait_status(), memory_kills_);
  if (const std::string_view error = text_at(block.failure); left) {
    const int status = processes_[index].wait_status().value_or(0);
    how = !error.empty()
              ? " has left the group" + step_of(peer) + ", ended by " + std::string(error)
          : status != 0 ? " has left the group" + step_of(peer) + text_of_end(status, memory_kills_)
                        : " ended normally" + step_of(peer);
  }
  return name_of(peer) + how + "; its last operation: " + last_of(peer);
}

std::string HostGroup::step_of(int64_t peer) const {
  const RankProgress& progress = blocks_[static_cast<size_t>(peer)]->progress;
  const uint64_t done = progress.steps_done.load(std::memory_order_acquire);
  return step_text(progress.steps_begun.load(std::memory_order_acquire), done);
}

// Advises by the gravest end of a rank that is gone: others may have left because of it.
std::string_view HostGroup::advice_on_absence() const {
  bool by_error = false;
  for (size_t peer = 0; peer < blocks_.size(); ++peer) {
    const bool left = blocks_[peer]->state.load(std::memory_order_acquire) == RankState::kLeft;
    if (!left && !processes_[peer].alive()) {
      const auto status = processes_[peer].wait_status();
      if (status && is_sigkill(*status))
        return "A killed rank leaves no error of its own. Start the group again.";
      if (status) return "Look for the error of that rank; then start the group again.";
      return "Look for the error of that rank; if it left none, it was killed (out of memory? see "
             "dmesg). Then start the group again.";
    }
    by_error |= left && (!text_at(blocks_[peer]->failure).empty() ||
                         processes_[peer].wait_status().value_or(0) != 0);
  }
  return by_error ? "Look for the error of that rank; then start the group again."
                  : "Did it have fewer batches, or steps? See join() of DDP, ZeRO and "
                    "fully_shard.";
}

void HostGroup::leave(std::string_view error) noexcept {
  if (blocks_.empty() || fork_guard_.in_child()) return;
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  RankBlock& own = block(rank_);
  if (own.state.load(std::memory_order_relaxed) != RankState::kHere) return;
  const size_t length = std::min(error.size(), own.failure.size() - 1);
  std::copy_n(error.begin(), length, own.failure.begin());
  own.failure[length] = '\0';
  own.state.store(RankState::kLeft, std::memory_order_seq_cst);
  ring_all();
}

// Waits for the exit status: a rank that reports no error may still end by sys.exit(1).
void HostGroup::wait_for_exit(int64_t peer) const {
  const PeerProcess& process = processes_[static_cast<size_t>(peer)];
  if (process.pid() == ::getpid()) return;
  const Clock::time_point until = Clock::now() + std::chrono::seconds(2);
  while (process.alive() && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

void HostGroup::wait_for_end(int64_t peer) {
  const Clock::time_point until = Clock::now() + std::chrono::seconds(1);
  while (absence_of(peer).empty() && !failure() && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Returns ranks that the awaited one may itself wait for: stopped ones, or the furthest behind.
std::string HostGroup::cause_beside(int64_t peer) const {
  const auto entered = [&](int64_t rank) {
    return blocks_[static_cast<size_t>(rank)]->entered.load(std::memory_order_acquire);
  };
  std::string stopped;
  int64_t last = peer;
  for (int64_t rank = 0; rank < world(); ++rank) {
    if (rank == peer || rank == rank_) continue;
    if (processes_[static_cast<size_t>(rank)].state() == "stopped")
      stopped += "; " + name_of(rank) + " is stopped";
    if (entered(rank) < entered(last)) last = rank;
  }
  if (!stopped.empty() || last == peer) return stopped;
  return "; " + name_of(last) + " is further behind, its last operation: " + last_of(last);
}

std::string HostGroup::lateness_of(int64_t peer, std::string_view deed,
                                   std::chrono::milliseconds patience) const {
  return name_of(peer) + " has not " + std::string(deed) + " within " + seconds(patience) +
         "; it is alive (" + processes_[static_cast<size_t>(peer)].state() +
         ") but not progressing" + step_of(peer) + "; its last operation: " + last_of(peer) +
         cause_beside(peer);
}

std::string HostGroup::last_of(int64_t peer) const {
  const RankBlock& block = *blocks_[static_cast<size_t>(peer)];
  const uint64_t last = block.entered.load(std::memory_order_acquire);
  if (std::string round = round_text(block.progress, last); !round.empty()) return round;
  if (last == 0) return "none";
  return "collective " + std::to_string(last) + ", " +
         block.records[last % kRecords].operation().to_string();
}

void HostGroup::show_round(const Operation& what) {
  RankBlock& own = block(rank_);
  const uint64_t round = own.progress.rounds.load(std::memory_order_relaxed) + 1;
  own.progress.deposits[round % own.progress.deposits.size()].write(
      own.entered.load(std::memory_order_relaxed), what);
  show_deposit({});
  own.progress.rounds.store(round, std::memory_order_release);
}

void HostGroup::show_deposit(std::string_view name) {
  RankBlock& own = block(rank_);
  const uint64_t number = own.progress.named.load(std::memory_order_relaxed) + 1;
  auto& place = own.progress.names[number % own.progress.names.size()];
  name.remove_prefix(name.size() - std::min(name.size(), place.size() - 1));  // the end tells more
  *std::copy(name.begin(), name.end(), place.begin()) = '\0';
  own.progress.named.store(number, std::memory_order_release);
}

void HostGroup::show_step(uint64_t number, bool is_done) {
  if (blocks_.empty()) return;
  RankBlock& own = block(rank_);
  auto& counter = is_done ? own.progress.steps_done : own.progress.steps_begun;
  if (number > counter.load(std::memory_order_relaxed))
    counter.store(number, std::memory_order_release);
}

std::string HostGroup::current() const {
  const Record& record = blocks_[static_cast<size_t>(rank_)]->records[sequence_ % kRecords];
  return "collective " + std::to_string(sequence_) + ", " + record.operation().to_string();
}

}  // namespace trireme::shm
