#include <trireme/shm/slot_ring.h>

#include <utility>

namespace trireme::shm {

Slot SlotRing::reserve(int64_t bytes, uint64_t step) {
  const auto ring = static_cast<uint64_t>(group_.ring_bytes());
  const uint64_t length = (static_cast<uint64_t>(bytes) + kCacheLine - 1) / kCacheLine * kCacheLine;
  if (head_ % ring + length > ring) head_ += ring - head_ % ring;
  const uint64_t begin = head_;
  head_ += length;

  uint64_t needed = 0;
  while (!held_.empty() && held_.front().begin + ring < head_) {
    needed = held_.front().step;
    held_.pop_front();
  }
  if (needed > 0) group_.wait_all(&RankBlock::consumed, needed);
  held_.push_back({begin, step});
  return {static_cast<int64_t>(begin % ring), bytes, step};
}

void SlotRing::rewind(const Mark& mark) {
  head_ = mark.head;
  while (!held_.empty() && held_.back().step > mark.step) held_.pop_back();
}

void SlotRing::follow_epoch() {
  if (std::exchange(epoch_, group_.epoch()) == epoch_) return;
  head_ = 0;
  held_.clear();
}

}  // namespace trireme::shm
