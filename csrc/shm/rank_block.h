#pragma once

#include <trireme/shm/operation.h>
#include <trireme/shm/segment.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <sys/types.h>

namespace trireme::shm {

constexpr size_t kCacheLine = 64;
constexpr size_t kRecords = 64;

enum class RankState : uint32_t { kJoining, kHere, kLeft, kFailed };
enum class OutboxState : uint32_t { kNone, kOpen, kClosed };

// The futex on which threads of one rank sleep. A peer that publishes something wakes them.
struct Futex {
  alignas(kCacheLine) std::atomic<uint32_t> rung{0};
  std::atomic<uint32_t> sleepers{0};
};

// How far a rank is, for messages.
struct RankProgress {
  // Rounds of deposits (deposit_ring.h): how many have begun, and the last ones by that number;
  // `sequence` is that of the last collective which the owner had entered by then.
  std::atomic<uint64_t> rounds{0};
  std::array<Record, 4> deposits{};
  // The names of the last deposits in the owner's round, by their number.
  std::atomic<uint64_t> named{0};
  std::array<std::array<char, 128>, 4> names{};

  // The steps that the owner has begun and done, see HostGroup::show_step().
  std::atomic<uint64_t> steps_begun{0};
  std::atomic<uint64_t> steps_done{0};
};

// The state that every rank shows to all its peers: the only content of its first segment.
//
// A step is one chunk of one collective: sequence number of the collective << kStepBits, plus the
// number of the chunk, plus one. Steps only grow, also over a collective that was refused, so a
// counter says "done up to and including this step" and nothing is ever reset.
struct RankBlock {
  // Written by the owner and read by all.
  alignas(kCacheLine) std::atomic<uint64_t> entered{0};  // sequence number of the last collective
  std::atomic<uint64_t> arrived{0};   // step whose input lies in the owner's ring
  std::atomic<uint64_t> reduced{0};   // step whose slice the owner has reduced
  std::atomic<uint64_t> consumed{0};  // step whose data the owner no longer needs

  Futex futex;       // rung by collectives
  Futex mail_futex;  // by messages, so that collectives do not wake a thread that waits for one

  alignas(kCacheLine) std::atomic<RankState> state{RankState::kJoining};
  pid_t pid = 0;
  int32_t rank = -1;  // in the group
  int32_t world = 0;
  std::array<char, 1024> failure{};  // why, zero-terminated, before state becomes kFailed or kLeft

  // The address of the segment with this rank's ring, which its first collective makes, or why
  // there is none.
  alignas(kCacheLine) std::atomic<uint64_t> ring_made{0};
  std::atomic<uint64_t> rings_mapped{0};  // the owner has mapped the rings of all
  std::array<char, 512> ring_address{};

  // The address of the segment with this rank's outgoing messages, which its first send makes,
  // before the state becomes kOpen.
  alignas(kCacheLine) std::atomic<OutboxState> outbox_state{OutboxState::kNone};
  std::array<char, 256> outbox_address{};

  // See HostGroup::abandon. Values that belong to a counter are written before it.
  alignas(kCacheLine) std::atomic<uint64_t> abandoned{0};  // last epoch that the owner gave up
  std::atomic<uint64_t> rejoined{0};                       // last epoch that it is ready for
  std::atomic<uint64_t> last_sequence{0};
  std::atomic<uint64_t> last_ring_attempt{0};
  std::atomic<bool> had_rings{false};
  std::array<char, 1024> reason{};

  alignas(kCacheLine) std::array<Record, kRecords> records{};

  // For onlookers that find this block without knowing the group (doctor.h); complete before the
  // state becomes kHere.
  alignas(kCacheLine) uint64_t layout = kLayout;
  Nonce group{};        // nonce of the block of this host's first rank
  int32_t members = 0;  // ranks on this host

  // A wait beside the collectives (HostGroup::wait_beside): what for, and since when, 0 for none.
  std::array<char, 192> context{};
  std::atomic<int64_t> wait_since_ns{0};
  std::atomic<bool> wait_is_shown{false};  // a thread of the owner shows one

  RankProgress progress{};

  // Spells "rank_b_4": the last letter changes when fields move and the size stays.
  static constexpr uint64_t kLayout = 0x345f625f6b6e6172;
};

constexpr int kStepBits = 24;
constexpr uint64_t step_of(uint64_t sequence, int64_t chunk) {
  return (sequence << kStepBits) + static_cast<uint64_t>(chunk) + 1;
}

// Returns "round 9 of deposits, the gradient of '2.weight'": the owner's last action, unless it has
// entered a collective since; then nothing. `entered` is the number of that.
std::string round_text(const RankProgress& progress, uint64_t entered);

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

}  // namespace trireme::shm
