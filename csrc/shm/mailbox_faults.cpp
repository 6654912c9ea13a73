// The ends of messages that do not arrive.

#include <trireme/shm/mailbox.h>

#include <algorithm>
#include <utility>

namespace trireme::shm {

void Mailbox::look() {
  if (is_idle()) return;
  if (const auto failure = group_.failure()) {
    for (const TransferPtr& transfer : pending()) end(transfer, FaultKind::kAborted, *failure);
    return forget_all();
  }
  // Asked first, since messages that a peer sent before it went still count.
  absences_.clear();
  for (int64_t peer = 0; peer < group_.world(); ++peer) absences_.push_back(absence_of(peer));
  while (progress()) {
  }
  const Clock::time_point now = Clock::now();
  for (const TransferPtr& transfer : pending()) {
    if (const std::string why = why_lost(*transfer); !why.empty()) {
      return break_off(FaultKind::kPeerLost,
                       error_text("mailbox", describe(*transfer) + ": " + why, group_.where(),
                                  group_.advice_on_absence()));
    }
    if (now >= transfer->deadline) {
      return break_off(
          FaultKind::kTimeout,
          error_text("mailbox", describe(*transfer) + ": " + why_late(*transfer), group_.where(),
                     "Look what that rank is doing, or raise the timeout."));
    }
  }
  // Drops messages without a recv, of which no more will come.
  for (int64_t peer = 0; peer < group_.world(); ++peer)
    if (!absences_[static_cast<size_t>(peer)].text.empty()) drop_stream(peer);
}

void Mailbox::withdraw(Transfer::Kind kind, const std::string& why) {
  for (const TransferPtr& transfer : pending())
    if (transfer->kind == kind) end(transfer, FaultKind::kAborted, why);
  if (kind == Transfer::Kind::kSend) {
    for (Outbox& outbox : outboxes_) outbox.sends.clear();
    pending_sends_ = 0;
    return;
  }
  recvs_.clear();
  wanted_of_any_ = 0;
  for (Inbox& inbox : inboxes_) {
    inbox.wanted = 0;
    inbox.target.reset();  // the rest of its message is dropped
  }
}

void Mailbox::close() {
  RankBlock& own = group_.block(group_.rank());
  if (own.outbox_state.exchange(OutboxState::kClosed, std::memory_order_seq_cst) ==
      OutboxState::kClosed)
    return;
  for (int64_t rank = 0; rank < group_.world(); ++rank) ring(group_.block(rank).mail_futex);
}

bool Mailbox::is_unfetched() {
  if (!segment_ || group_.failure()) return false;
  for (int64_t rank = 0; rank < group_.world(); ++rank) {
    if (rank != group_.rank() && outboxes_[static_cast<size_t>(rank)].ring.is_unfetched() &&
        absence_of(rank).text.empty())
      return true;
  }
  return false;
}

// Returns the transfers that are posted and not ended, sends to one rank in their order.
std::vector<TransferPtr> Mailbox::pending() const {
  std::vector<TransferPtr> pending(recvs_.begin(), recvs_.end());
  for (const Outbox& outbox : outboxes_)
    pending.insert(pending.end(), outbox.sends.begin(), outbox.sends.end());
  for (const Inbox& inbox : inboxes_)
    if (inbox.target) pending.push_back(inbox.target);
  return pending;
}

Mailbox::Absence Mailbox::absence_of(int64_t peer) {
  const RankBlock& block = group_.block(peer);
  std::string text = group_.absence_of(peer);
  const bool left = block.state.load(std::memory_order_acquire) == RankState::kLeft ||
                    block.outbox_state.load(std::memory_order_acquire) == OutboxState::kClosed;
  if (left && text.empty()) text = rank_name(peer) + " has left the group";
  return {text, left};
}

// A recv from any rank ends with the first that died, and with the last that left.
std::string Mailbox::why_lost(const Transfer& transfer) const {
  const bool any = transfer.peer == kAnyRank && transfer.source == kAnyRank;
  if (!any) {
    const int64_t peer = transfer.peer == kAnyRank ? transfer.source : transfer.peer;
    return peer == group_.rank() ? std::string() : absences_[static_cast<size_t>(peer)].text;
  }
  int64_t left = 0;
  std::string why;
  for (int64_t peer = 0; peer < group_.world(); ++peer) {
    const Absence& absence = absences_[static_cast<size_t>(peer)];
    if (peer == group_.rank() || absence.text.empty()) continue;
    if (!absence.left) return absence.text;
    why = absence.text;
    ++left;
  }
  return left == group_.world() - 1 ? why : std::string();
}

std::string Mailbox::why_late(const Transfer& transfer) const {
  const auto timeout = transfer.timeout.count() > 0 ? transfer.timeout : group_.timeout();
  const bool sends = transfer.kind == Transfer::Kind::kSend;
  const int64_t peer = transfer.peer == kAnyRank ? transfer.source : transfer.peer;
  if (peer != kAnyRank) return group_.lateness_of(peer, sends ? "received" : "sent", timeout);
  return "no rank has sent within " + std::to_string(timeout.count()) + " ms";
}

void Mailbox::end(const TransferPtr& transfer, FaultKind kind, const std::string& text) {
  transfer->fault.emplace(kind, text);
  ended_.push_back(transfer);
}

void Mailbox::report_overwritten(int64_t peer, const std::string& got) {
  break_off(FaultKind::kAborted,
            error_text("mailbox",
                       "got " + got + ", from " + rank_name(peer) + ": its memory was overwritten",
                       group_.where(), "Look for stray writes in that process."));
}

void Mailbox::break_off(FaultKind kind, const std::string& text) {
  group_.fail(text);
  for (const TransferPtr& transfer : pending()) end(transfer, kind, text);
  forget_all();
}

void Mailbox::forget_all() {
  recvs_.clear();
  wanted_of_any_ = 0;
  pending_sends_ = 0;
  for (Outbox& outbox : outboxes_) outbox.sends.clear();
  for (int64_t peer = 0; peer < group_.world(); ++peer) {
    inboxes_[static_cast<size_t>(peer)].wanted = 0;
    inboxes_[static_cast<size_t>(peer)].target.reset();
    drop_stream(peer);
  }
  letters_.clear();
}

// Drops the received part of a message without a recv, and its place in the ring, because its
// source is gone.
void Mailbox::drop_stream(int64_t source) {
  Inbox& inbox = inboxes_[static_cast<size_t>(source)];
  if (!inbox.streams || inbox.target) return;
  if (inbox.letter) letters_.erase(*inbox.letter);
  inbox.letter.reset();
  inbox.streams = false;
  --streams_;
}

// Returns "recv of 4 float32 from rank 1 with tag 3".
std::string Mailbox::describe(const Transfer& transfer) const {
  const bool sends = transfer.kind == Transfer::Kind::kSend;
  const int64_t element = std::max<int64_t>(element_bytes(transfer.dtype), 1);
  return std::string(sends ? "send" : "recv") + " of " +
         std::to_string(transfer.memory.bytes() / element) + " " +
         std::string(name(transfer.dtype)) + (sends ? " to " : " from ") +
         (transfer.peer == kAnyRank ? std::string("any rank") : rank_name(transfer.peer)) +
         " with tag " + std::to_string(transfer.tag);
}

std::string Mailbox::rank_name(int64_t peer) const {
  return "rank " + std::to_string(group_.members()[static_cast<size_t>(peer)]);
}

}  // namespace trireme::shm
