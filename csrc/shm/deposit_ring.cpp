#include <trireme/shm/deposit_ring.h>

#include <trireme/shm/collectives_scope.h>

#include <algorithm>
#include <string>

namespace trireme::shm {
namespace {

constexpr std::string_view kDepositArea = "deposit_ring";
constexpr auto kDepositBlockBytes = static_cast<int64_t>(sizeof(DepositBlock));

}  // namespace

DepositRing::DepositRing(Collectives& collectives, int64_t bytes, const CallOptions& call)
    : group_(collectives.group()),
      bytes_(bytes),
      segments_(collectives.share_segments(kDepositBlockBytes + bytes, call)),
      epoch_(group_.epoch()) {}

DepositBlock& DepositRing::block(int64_t peer) const {
  return *reinterpret_cast<DepositBlock*>(segments_[static_cast<size_t>(peer)].data());
}

int64_t DepositRing::until_wrap(uint64_t position) const {
  return bytes_ - static_cast<int64_t>(position % static_cast<uint64_t>(bytes_));
}

void DepositRing::begin_round(const Operation& what, std::chrono::milliseconds timeout) {
  group_.check_usable();
  if (group_.has_abandoned()) {
    throw Fault(
        FaultKind::kAbandoned,
        error_text(kDepositArea, "got a round of deposits after work was abandoned", group_.where(),
                   "Call a collective on all ranks first, a barrier if nothing else."));
  }
  timeout_ = timeout;
  base_ += length_;
  length_ = 0;
  if (epoch_ != group_.epoch()) start_again();
  length_ = static_cast<uint64_t>(round_up(what.count));
  deposited_ = collected_ = base_;
  round_is_checked_ = false;
  ++round_;
  block(group_.rank()).rounds[round_ % 2].write(round_, what);
  group_.show_round(what);
}

// Starts behind the last position of any rank, since ranks may have abandoned different rounds.
void DepositRing::start_again() {
  epoch_ = group_.epoch();
  DepositBlock& own = block(group_.rank());
  own.base.store(base_, std::memory_order_relaxed);
  own.base_epoch.store(epoch_, std::memory_order_seq_cst);
  group_.wake_peers();
  const WaitContext context{"the first round of deposits after work was abandoned", timeout_};
  for (int64_t peer = 0; peer < group_.world(); ++peer) {
    if (peer != group_.rank()) group_.wait_beside(peer, block(peer).base_epoch, epoch_, context);
    base_ = std::max(base_, block(peer).base.load(std::memory_order_relaxed));
  }
  round_ = 0;
  own.deposited.store(base_, std::memory_order_seq_cst);
  own.collected.store(base_, std::memory_order_seq_cst);
}

std::span<std::byte> DepositRing::room(int64_t bytes) {
  const auto capacity = static_cast<uint64_t>(bytes_);
  uint64_t free_until = collected_ + capacity;
  for (int64_t peer = 0; peer < group_.world(); ++peer) {
    if (peer == group_.rank()) continue;
    const uint64_t theirs = block(peer).collected.load(std::memory_order_acquire);
    free_until = std::min(free_until, theirs + capacity);
  }
  // A peer that has not begun the round yet may be far behind after an abandoned one.
  const int64_t free = free_until > deposited_ ? static_cast<int64_t>(free_until - deposited_) : 0;
  const int64_t piece = std::min({bytes, free, until_wrap(deposited_)});
  std::byte* ring = segments_[static_cast<size_t>(group_.rank())].data() + kDepositBlockBytes;
  return {ring + deposited_ % capacity, static_cast<size_t>(piece)};
}

void DepositRing::deposit(int64_t bytes) {
  deposited_ += static_cast<uint64_t>(bytes);
  block(group_.rank()).deposited.store(deposited_, std::memory_order_seq_cst);
  group_.wake_peers();
}

int64_t DepositRing::ready(int64_t bytes) {
  uint64_t last = deposited_;
  for (int64_t peer = 0; peer < group_.world(); ++peer) {
    if (peer != group_.rank())
      last = std::min(last, block(peer).deposited.load(std::memory_order_acquire));
  }
  if (last <= collected_) return 0;
  check_round();
  return std::min({bytes, static_cast<int64_t>(last - collected_), until_wrap(collected_)});
}

const std::byte* DepositRing::of(int64_t peer) const {
  return segments_[static_cast<size_t>(peer)].data() + kDepositBlockBytes +
         collected_ % static_cast<uint64_t>(bytes_);
}

void DepositRing::collect(int64_t bytes) {
  collected_ += static_cast<uint64_t>(bytes);
  block(group_.rank()).collected.store(collected_, std::memory_order_seq_cst);
  group_.wake_peers();
}

// Compares rounds: a rank that has deposited bytes has published its round before.
void DepositRing::check_round() {
  if (round_is_checked_) return;
  const Record& mine = block(group_.rank()).rounds[round_ % 2];
  for (int64_t peer = 0; peer < group_.world(); ++peer) {
    const Record& theirs = block(peer).rounds[round_ % 2];
    if (theirs.fingerprint == mine.fingerprint && theirs.sequence == mine.sequence) continue;
    const auto& members = group_.members();
    const std::string text =
        error_text(kDepositArea,
                   "ranks do not agree about round " + std::to_string(round_) + " of deposits: " +
                       describe_mismatch(group_.where().rank, mine,
                                         members[static_cast<size_t>(peer)], theirs),
                   group_.where(), "Use the same model with the same settings on every rank.");
    group_.abandon(text);
    throw Fault(FaultKind::kMismatch, text);
  }
  round_is_checked_ = true;
}

// Does not wait for room while bytes may become ready: the peers may be waiting for this rank to
// collect just those. Once it has collected all that it deposited, they have all that they need to
// go on.
void DepositRing::wait(std::string_view name) {
  const WaitContext context{name, timeout_};
  const bool lacks = collected_ < deposited_ || deposited_ == base_ + length_;
  for (int64_t peer = 0; peer < group_.world(); ++peer) {
    if (peer == group_.rank()) continue;
    if (lacks) {
      group_.wait_beside(peer, block(peer).deposited, collected_ + 1, context);
    } else {
      const uint64_t past = deposited_ + 1 - static_cast<uint64_t>(bytes_);
      group_.wait_beside(peer, block(peer).collected, past, context);
    }
  }
}

}  // namespace trireme::shm
