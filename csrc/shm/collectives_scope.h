#pragma once

#include <trireme/shm/collectives.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace trireme::shm {

// One collective while it runs.
class Collectives::Scope {
 public:
  Scope(Collectives& owner, const Operation& operation, const CallOptions& call)
      : group_(owner.group_), ring_(owner.ring_), sequence_(group_.begin(operation, call.timeout)) {
    ring_.follow_epoch();
    mark_ = ring_.mark(step_of(sequence_, -1));
  }
  ~Scope() { group_.finish(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  Slot reserve(int64_t bytes) {
    if (!group_.has_rings()) {
      check();
      group_.make_rings();
    }
    return ring_.reserve(bytes, step_of(sequence_, chunks_++));
  }

  // Compares the operations of all ranks. Called before the first byte of a peer is read.
  void check() {
    if (checked_) return;
    try {
      group_.check_entered();
    } catch (...) {
      ring_.rewind(mark_);
      throw;
    }
    checked_ = true;
  }

  const Record& record_of(int64_t peer) { return group_.block(peer).records[sequence_ % kRecords]; }

 private:
  HostGroup& group_;
  SlotRing& ring_;
  uint64_t sequence_;
  SlotRing::Mark mark_{};
  int64_t chunks_ = 0;
  bool checked_ = false;
};

constexpr int64_t kSliceBytes = 256 * 1024;  // bytes of one rank in one chunk

constexpr auto kLine = static_cast<int64_t>(kCacheLine);

inline int64_t round_up(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// The way of a collective through the slots: `count` chunks, of at most `bytes` of each rank in
// one.
struct Chunks {
  // Cuts the ranks' data, at most `longest` bytes each, for slots with `room` bytes for each.
  Chunks(int64_t longest, int64_t room)
      : bytes(std::min({kSliceBytes, room / kLine * kLine, round_up(longest)})),
        count(bytes == 0 ? 0 : (longest + bytes - 1) / bytes) {}
  int64_t bytes;
  int64_t count;
};

// Returns how much of [0, total) lies in chunk number `chunk`.
inline int64_t part_of(int64_t total, int64_t chunk, int64_t chunk_bytes) {
  return std::clamp<int64_t>(total - chunk * chunk_bytes, 0, chunk_bytes);
}

inline void copy_in(std::byte* slot, const Pieces& from, int64_t begin, int64_t length) {
  from.visit(begin, length, [&](const std::byte* memory, int64_t offset, int64_t bytes) {
    copy(slot + offset, memory, bytes);
  });
}

// Results that the caches cannot hold until they are read go past them, which spares reading the
// lines first.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

inline void copy_out(const Pieces& to, int64_t begin, const std::byte* slot, int64_t length) {
  const bool stream = to.bytes() >= kStreamBytes;
  to.visit(begin, length, [&](std::byte* memory, int64_t offset, int64_t bytes) {
    stream ? copy_streaming(memory, slot + offset, bytes) : copy(memory, slot + offset, bytes);
  });
}

inline uint64_t hash_of(const std::vector<Pieces>& pieces) {
  uint64_t hash = pieces.size();
  for (const Pieces& piece : pieces) hash = mix(hash, static_cast<uint64_t>(piece.bytes()));
  return hash;
}

inline int64_t total_of(const std::vector<Pieces>& pieces) {
  int64_t bytes = 0;
  for (const Pieces& piece : pieces) bytes += piece.bytes();
  return bytes;
}

}  // namespace trireme::shm
