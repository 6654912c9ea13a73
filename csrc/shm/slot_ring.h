#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/host_group.h>

#include <cstddef>
#include <cstdint>
#include <deque>

namespace trireme::shm {

// A place in every rank's ring, at the same offset in all of them.
struct Slot {
  int64_t offset = 0;
  int64_t bytes = 0;
  uint64_t step = 0;
};

// The rings of a host group as one allocator: all ranks reserve the same slots in the same order,
// so no rank has to say where data lie. A slot is used again only when all peers have consumed its
// data (counters per rank, not a parity: sizes mix freely). Going round through more memory than a
// core's own cache is what makes it fast: a slot that a peer still has in its cache costs an
// invalidation per line.
class TRIREME_API SlotRing {
 public:
  explicit SlotRing(HostGroup& group) : group_(group) {}

  // Returns the size of the largest slot, a quarter of the ring, so that a pipeline of three stages
  // never waits for itself.
  int64_t largest_slot() const { return group_.ring_bytes() / 4 / 64 * 64; }

  // Waits until all ranks have consumed the slot's old data.
  Slot reserve(int64_t bytes, uint64_t step);
  std::byte* of(int64_t peer, const Slot& slot) { return group_.ring_of(peer) + slot.offset; }

  // The state before a collective; if all ranks refuse it, all give back the slots reserved since.
  struct Mark {
    uint64_t head;
    uint64_t step;
  };
  Mark mark(uint64_t step) const { return {head_, step}; }
  void rewind(const Mark& mark);
  // Called when a collective begins: ranks that abandoned one may have reserved different slots.
  void follow_epoch();

 private:
  struct Held {
    uint64_t begin;  // counted over all rounds
    uint64_t step;
  };

  HostGroup& group_;
  uint64_t head_ = 0;
  uint64_t epoch_ = 1;
  std::deque<Held> held_;
};

}  // namespace trireme::shm
