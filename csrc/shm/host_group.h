#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/shm/fault.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/shm/liveness.h>
#include <trireme/shm/rank_block.h>
#include <trireme/shm/segment.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::shm {

// Exchanges texts between ranks before they share memory: a c10d::Store, in comm/.
struct Exchange {
  virtual ~Exchange() = default;
  virtual void put(const std::string& key, const std::string& text) = 0;
  virtual std::string get(const std::string& key) = 0;  // waits until it is there; throws
};

struct HostGroupRequest {
  RankOf where;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  // limit of one collective
  // For tests: ranks with different texts behave as if they were on different hosts.
  std::string partition{};
};

using Counter = std::atomic<uint64_t> RankBlock::*;

// A wait outside the collectives: its name, for messages, and its limit.
struct WaitContext {
  std::string_view name;
  std::chrono::milliseconds timeout;
  bool spares_group = false;  // when the time is over: only this wait ends
};

// [Note: abandoned work]
//
// A rank that an exception takes out of the common work (a backward, say) abandons it. That ends an
// epoch of the group: a rank that waits for it, now or later in the same epoch, raises with its
// reason and has then abandoned the work too. Nothing need be torn down, since no rank can mistake
// the following work for the abandoned work: the next collective of each rank first waits until all
// have come to theirs, and goes on behind the highest sequence number that any of them had reached.

// One segment that all ranks of a host map; or none, and the reason.
struct SharedSegment {
  Segment segment;
  std::string why_not;
};

// The ranks of a group that share the memory of a host, and the memory through which they meet: per
// rank a small segment with its counters and last operations, and from the first collective that
// moves data on a second one with a ring of slots, both mapped by all. Ranks may be processes or
// threads of one process.
//
// Which ranks share a host is proven, not read from the environment: each rank writes a random
// number into its segment, publishes its address through the Exchange, and opens the others'. All
// ranks then vote; a set of ranks is a host only if each of them sees all others of it.
//
// Extra memory: world x (ring_bytes() + 16 KiB), never more than 16 MiB up to 8 ranks. No memory,
// name or process of it outlives the ranks.
//
// Every wait watches the deadline, the messages of other ranks and whether the awaited process
// lives; it throws Fault with all that is known, and from then on every call throws at once. One
// thread at a time, except for the functions that any thread may call. A wait may also be ended by
// an Interruption (common/interruption.h), which abandons the epoch with its reason.
class TRIREME_API HostGroup {
 public:
  // Collective over all ranks of the group. Throws Fault on all of them if one has no memory; if a
  // host does not let its processes share memory each rank is a host of its own, and why_alone()
  // returns the reason.
  static std::unique_ptr<HostGroup> join(Exchange& exchange, const HostGroupRequest& request);

  // Leaves: peers that still wait for this rank raise.
  ~HostGroup();
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  RankOf where() const { return where_; }
  // Returns the ranks of the whole group, by host; equal on every rank.
  const std::vector<std::vector<int64_t>>& hosts() const { return hosts_; }
  // Returns the ranks of this host, as ranks of the group, ascending. All below counts them from 0.
  const std::vector<int64_t>& members() const { return members_; }
  int64_t rank() const { return rank_; }
  int64_t world() const { return static_cast<int64_t>(members_.size()); }
  const std::string& why_alone() const { return why_alone_; }

  // Returns whether the rank has a block; false only for a rank alone that got no memory to share.
  bool has_memory() const { return !blocks_.empty(); }
  RankBlock& block(int64_t peer) { return *blocks_[static_cast<size_t>(peer)]; }
  int64_t ring_bytes() const { return ring_bytes_; }
  // May be called after make_rings().
  std::byte* ring_of(int64_t peer) { return rings_[static_cast<size_t>(peer)].data(); }

  // Begins a collective; returns its sequence number. Peers see it with the next publish().
  uint64_t begin(const Operation& operation, std::chrono::milliseconds timeout);
  // Returns the number of the last collective that began.
  uint64_t sequence() const { return sequence_; }
  // Tells the peers that this rank has entered, if no publish() has yet.
  void enter();
  // Waits until all have entered and compares their operations. Throws Fault(kMismatch) on all
  // ranks alike, naming two of them; then nothing has moved and the next collective works.
  void check_entered();
  // Waits for each rank until the deadline, also behind one that has died, so that an error names
  // every rank that does not come, and not only the first. Called before check_entered().
  void roll_call();
  // Makes the rings, unless they are there: collective, inside a collective that all have entered.
  // Throws Fault(kMemory) on all ranks alike if one of them has none; the next call tries again.
  void make_rings();
  // Makes a segment of `bytes` on each rank, and returns all, by rank. Collective, and throws, as
  // make_rings().
  std::vector<Segment> share_segments(int64_t bytes);
  // Makes one segment for all, each rank reserving its part of the pages (of equal bytes, in rank
  // order). All ranks alike get none, with the reason, if one of them cannot have it.
  SharedSegment share_segment(int64_t bytes);
  bool has_rings() const { return !rings_.empty(); }
  void finish();

  // Stores into a counter of this rank, and wakes sleeping peers.
  void publish(Counter counter, uint64_t value);
  void wait(int64_t peer, Counter counter, uint64_t target);
  void wait_all(Counter counter, uint64_t target);

  // The functions below may be called by any thread, beside the one that is in a collective.

  // Leaves a message: every rank of the host raises with this text, now and later.
  void fail(const std::string& text) noexcept;
  // Tells peers that this rank takes no further part, as its destructor does; `error` is the error
  // that ended it, if any.
  void leave(std::string_view error) noexcept;
  // Ends the epoch (see the note above); does nothing if it has ended.
  void abandon(const std::string& reason) noexcept;
  bool has_abandoned() const;
  // Returns the reason that this rank gave, or received, when it last abandoned an epoch.
  std::string why_abandoned() const;
  // Returns which of `peer` and this rank has ended this epoch, and why; empty if neither has.
  std::string left_by(int64_t peer) const;
  // Returns the number of the epoch, from 1. Changes only inside begin().
  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }
  // Waits until a counter in shared memory that `peer` writes has reached `target`.
  void wait_beside(int64_t peer, const std::atomic<uint64_t>& counter, uint64_t target,
                   const WaitContext& context);
  // Wakes peers that wait_beside(). Called after a sequentially consistent store to their counter.
  void wake_peers();
  // Shows peers that this rank begins a round of deposits, its last operation until it enters a
  // collective. One thread at a time.
  void show_round(const Operation& what);
  // Shows peers the name of the last deposit in that round. One thread at a time.
  void show_deposit(std::string_view name);
  // Shows peers that this rank has begun step `number`, or has done it. A step is one of the
  // user's, as every strategy counts it.
  void show_step(uint64_t number, bool is_done);
  // Returns why this group can no longer be used, as far as this rank or its peers know.
  std::optional<std::string> failure();
  // Throws Fault for a group that failed, and in a forked child.
  void check_usable();
  // Returns "rank 1 (process 7) has died in step 4: it was killed by SIGKILL; its last operation:
  // ...", "rank 1 (process 7) ended normally after step 3; ..."; empty while it is there.
  std::string absence_of(int64_t peer) const;
  // Returns the next step for the user of a rank that missed peers, by how these ended.
  std::string_view advice_on_absence() const;
  // Waits until that rank is gone, the group has failed or a second has passed: a killed process
  // closes its files, which a peer then fails to open, a moment before it counts as dead.
  void wait_for_end(int64_t peer);
  // Returns "rank 1 (process 7) has not `deed` within 2 s; it is alive (stopped) ...".
  std::string lateness_of(int64_t peer, std::string_view deed,
                          std::chrono::milliseconds patience) const;
  // Limit waits that have no timeout of their own, from now on; any thread may set it.
  std::chrono::milliseconds timeout() const { return group_timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { group_timeout_ = timeout; }
  // Returns the kind of all segments of this group.
  SegmentKind segment_kind() const { return segments_[static_cast<size_t>(rank_)].address().kind; }

 private:
  class PeerWatch;
  class RollCallWatch;
  HostGroup(const HostGroupRequest& request);

  void meet(Exchange& exchange, SegmentKind kind);
  bool look_for_peers(Exchange& exchange, SegmentKind kind, std::string& row);
  void divide_into_hosts(const std::vector<std::string>& rows);
  void ring_all() noexcept;
  void rejoin();
  void tell(const std::string& text);
  std::string_view told_by(int64_t peer) const;
  void all_have_told();
  std::string complaint() const;
  Segment open_told(int64_t peer, int64_t bytes, std::string& why_not,
                    bool keeps_file = false) const;
  [[noreturn]] void throw_fault(FaultKind kind, const std::string& what, const std::string& why);
  std::string name_of(int64_t peer) const;
  void wait_for_exit(int64_t peer) const;
  std::string step_of(int64_t peer) const;
  std::string last_of(int64_t peer) const;
  std::string cause_beside(int64_t peer) const;
  std::string current() const;

  RankOf where_;
  HostGroupRequest request_;
  std::vector<std::vector<int64_t>> hosts_;
  std::vector<int64_t> members_;
  int64_t rank_ = 0;
  int64_t ring_bytes_ = 0;
  std::string why_alone_;
  ForkGuard fork_guard_;
  std::optional<int64_t> memory_kills_;  // out_of_memory_kills() at that time

  std::vector<Segment> segments_;
  std::vector<Segment> rings_;
  std::vector<PeerProcess> processes_;
  std::vector<RankBlock*> blocks_;
  std::unique_ptr<FlagWait> flag_wait_;

  uint64_t ring_attempts_ = 0;
  uint64_t sequence_ = 0;
  bool entered_ = true;
  std::atomic<uint64_t> epoch_{1};
  std::atomic<std::chrono::milliseconds> group_timeout_;
  std::chrono::milliseconds timeout_{};  // limit of the collective that runs
  Clock::time_point deadline_;
  std::mutex failure_mutex_;
  std::string failure_;
};

}  // namespace trireme::shm
