// How a wait of a host group ends without what it waited for: who is missing, and what all say
// then.

#include <trireme/common/forks.h>
#include <trireme/shm/host_group.h>

#include <algorithm>
#include <cstring>

namespace trireme::shm {
namespace {

constexpr std::string_view kArea = "host_group";

std::string seconds(std::chrono::milliseconds duration) {
  const auto ms = duration.count();
  return ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms";
}

}  // namespace

// What a rank looks at while it sleeps: first whether another one has left word, which says more
// than its silence, then whether the awaited one still lives.
class HostGroup::PeerWatch final : public Watch {
 public:
  PeerWatch(HostGroup& group, int64_t peer) : group_(group), peer_(peer) {}

  bool pointless() override {
    if (group_.failure()) return true;
    why_ = group_.absence_of(peer_);
    return !why_.empty();
  }

  void give_up() override {
    if (why_.empty()) group_.check_usable();
    group_.give_up(FaultKind::kPeerLost, why_);
  }

  void overdue() override {
    group_.give_up(FaultKind::kTimeout, group_.lateness_of(peer_, "come", group_.timeout_));
  }

 private:
  HostGroup& group_;
  int64_t peer_;
  std::string why_;
};

void HostGroup::wait(int64_t peer, Counter counter, uint64_t target) {
  PeerWatch watch(*this, peer);
  flag_wait_->until(block(peer).*counter, target, deadline_, watch);
}

void HostGroup::wait_all(Counter counter, uint64_t target) {
  for (int64_t peer = 0; peer < world(); ++peer)
    if (peer != rank_) wait(peer, counter, target);
}

void HostGroup::check_usable() {
  if (forks_ != forks_so_far()) {
    throw Fault(FaultKind::kForked,
                error_text(kArea,
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
    failure_ = error_text(kArea,
                          "the group has failed: rank " + std::to_string(members_[peer]) +
                              " says: " + std::string(block.failure.data(), length),
                          where_, "Make a new group, without the rank that failed.");
    return failure_;
  }
  return std::nullopt;
}

void HostGroup::fail(const std::string& text) noexcept {
  if (blocks_.empty() || forks_ != forks_so_far()) return;
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  RankBlock& own = block(rank_);
  if (own.state.load(std::memory_order_relaxed) == RankState::kFailed) return;
  const size_t length = std::min(text.size(), own.failure.size() - 1);
  std::memcpy(own.failure.data(), text.data(), length);
  own.failure[length] = '\0';
  own.state.store(RankState::kFailed, std::memory_order_seq_cst);
  ring_all();
}

void HostGroup::ring_all() noexcept {
  for (RankBlock* peer : blocks_) {
    ring(peer->bell);
    ring(peer->mail_bell);
  }
}

void HostGroup::give_up(FaultKind kind, const std::string& why) {
  const char* next_step = kind == FaultKind::kPeerLost
                              ? "Look for the error of that rank; then start the group again."
                              : "Look what that rank is doing, or raise the timeout.";
  const std::string text = error_text(kArea, current() + ": " + why, where_, next_step);
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
  const bool left = blocks_[index]->state.load(std::memory_order_acquire) == RankState::kLeft;
  if (!left && processes_[index].alive()) return {};
  return name_of(peer) + (left ? " has left the group" : " has died") +
         "; its last operation: " + last_of(peer);
}

std::string HostGroup::lateness_of(int64_t peer, std::string_view deed,
                                   std::chrono::milliseconds patience) const {
  return name_of(peer) + " has not " + std::string(deed) + " within " + seconds(patience) +
         "; it is alive (" + processes_[static_cast<size_t>(peer)].state() +
         ") but not progressing; its last operation: " + last_of(peer);
}

std::string HostGroup::last_of(int64_t peer) const {
  const RankBlock& block = *blocks_[static_cast<size_t>(peer)];
  const uint64_t last = block.entered.load(std::memory_order_acquire);
  if (last == 0) return "none";
  return "collective " + std::to_string(last) + ", " +
         block.records[last % kRecords].operation().to_string();
}

std::string HostGroup::current() const {
  const Record& record = blocks_[static_cast<size_t>(rank_)]->records[sequence_ % kRecords];
  return "collective " + std::to_string(sequence_) + ", " + record.operation().to_string();
}

}  // namespace trireme::shm
