#pragma once

#include <trireme/shm/byte_ring.h>
#include <trireme/shm/host_group.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <unistd.h>

namespace trireme::shm::test {

// A host group of two, of which the second is memory that a test writes.
class FakePeer final : public Exchange {
 public:
  FakePeer()
      : segment_(Segment::create(SegmentKind::kAnonymous, sizeof(RankBlock))),
        block_(new(segment_.data()) RankBlock),
        address_(segment_.address().to_string() + "\n" + pid_namespace() + "\n") {
    block_->pid = ::getpid();
    block_->rank = 1;
    block_->world = block_->members = 2;
    block_->state.store(RankState::kHere);
  }

  void put(const std::string& key, const std::string& text) override {
    if (key.ends_with("sees/0")) own_row_ = text;
    if (key.ends_with("address/0")) own_address_ = text;
  }
  std::string get(const std::string& key) override {
    if (key.ends_with("address/0")) return own_address_;
    if (key.ends_with("sees/0")) return own_row_;
    return key.ends_with("address/1") ? address_ : row_;
  }

  std::unique_ptr<HostGroup> join(std::chrono::milliseconds timeout = std::chrono::seconds(5)) {
    return HostGroup::join(*this, {{0, 2}, timeout});
  }
  RankBlock& block() { return *block_; }
  // Makes what a Mailbox of this peer would make for two ranks; the ring is to rank 0, and empty.
  ByteRingBlock& open_outbox() {
    const std::string text = outbox_.address().to_string();
    block_->outbox_address.fill('\0');
    std::copy(text.begin(), text.end(), block_->outbox_address.begin());
    block_->outbox_state.store(OutboxState::kOpen);
    return *new (outbox_.data()) ByteRingBlock;
  }
  // In place of its own, at the next join().
  void say(std::string_view address, std::string_view row) {
    address_ = address;
    row_ = row;
  }

 private:
  static constexpr int64_t kStride = sizeof(ByteRingBlock) + 256 * 1024;

  Segment segment_;
  Segment outbox_ = Segment::create(SegmentKind::kAnonymous, 2 * kStride);
  RankBlock* block_;
  std::string address_;
  std::string row_ = "11-";
  std::string own_row_;
  std::string own_address_;
};

}  // namespace trireme::shm::test
