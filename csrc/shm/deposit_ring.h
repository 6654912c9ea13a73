#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/collectives.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace trireme::shm {

// [Note: deposit and collect]
//
// A reduction in which a rank waits only if it must. A round is a run of bytes that all ranks lay
// out alike. Each rank deposits its own bytes from the first to the last, as it computes them, in a
// ring that its peers map. Each rank collects bytes that all have deposited: it reduces the part
// that it owns straight out of the rings, in rank order, into its private memory, and skips the
// rest. A place in a ring is used again when all ranks are past it. So a rank that is early leaves
// its bytes for the others, and a rank waits only if its ring is full or, at the end, for bytes
// that it still lacks.
//
// Compared with a collective per bucket the bytes are copied once instead of twice (no flat buffer
// that is copied into slots), while they are still in cache, and the ring stays there.

// The part of a ring that peers see, at the start of its segment. Zeros are an empty ring.
struct DepositBlock {
  // Positions count bytes over all rounds, and only grow.
  alignas(kCacheLine) std::atomic<uint64_t> deposited;
  alignas(kCacheLine) std::atomic<uint64_t> collected;
  // See HostGroup::abandon: where the owner could start again, and since which epoch that holds.
  alignas(kCacheLine) std::atomic<uint64_t> base;
  std::atomic<uint64_t> base_epoch;
  // Records of the round that the owner deposits and the one before, by parity.
  std::array<Record, 2> rounds;
};

// The rings of a host group for one stream of deposits; a group may have many. The functions are
// called by one thread at a time, which need not be the one that runs the group's collectives.
//
// Throws Fault: kMismatch, naming both sides, if ranks began different rounds; otherwise see
// HostGroup. This rank has then abandoned the epoch, or the group has failed.
class TRIREME_API DepositRing {
 public:
  // Collective, in the order of the group's collectives. Extra memory: `bytes` per rank, which is
  // the same on all of them and a multiple of 64.
  DepositRing(Collectives& collectives, int64_t bytes, const CallOptions& call);
  DepositRing(const DepositRing&) = delete;
  DepositRing& operator=(const DepositRing&) = delete;

  // Begins a round. Every rank passes the same `what`, whose count is in bytes. Every position of
  // the last round must have been deposited and collected. After an abandoned round the group must
  // have had a collective, and this call waits for all ranks; otherwise it returns at once.
  void begin_round(const Operation& what, std::chrono::milliseconds timeout);

  // Return how many bytes of this round were deposited or collected.
  int64_t deposited() const { return static_cast<int64_t>(deposited_ - base_); }
  int64_t collected() const { return static_cast<int64_t>(collected_ - base_); }

  // Returns where the next bytes go: at most `bytes`, in one piece; nothing while the ring is full.
  std::span<std::byte> room(int64_t bytes);
  // Lets all ranks read the next `bytes`, which lie where room() said.
  void deposit(int64_t bytes);

  // Returns how many of the next bytes all have deposited: at most `bytes`, in one piece.
  int64_t ready(int64_t bytes);
  // Returns where the next bytes of a rank lie.
  const std::byte* of(int64_t peer) const;
  // Moves this rank past the next `bytes`, whether all have deposited them or not.
  void collect(int64_t bytes);

  // Waits, when room() and ready() have nothing, until one of them may have. `name` says in errors
  // which bytes are to be deposited or missing.
  void wait(std::string_view name);

 private:
  DepositBlock& block(int64_t peer) const;
  int64_t until_wrap(uint64_t position) const;
  void check_round();
  void start_again();

  HostGroup& group_;
  int64_t bytes_;
  std::vector<Segment> segments_;
  std::chrono::milliseconds timeout_{};
  uint64_t epoch_;
  uint64_t round_ = 0;
  uint64_t base_ = 0;    // where this round begins
  uint64_t length_ = 0;  // length of this round
  uint64_t deposited_ = 0;
  uint64_t collected_ = 0;
  bool round_is_checked_ = false;
};

}  // namespace trireme::shm
