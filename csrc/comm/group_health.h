#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/fault_board.h>
#include <trireme/comm/progress.h>
#include <trireme/common/error.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace trireme {

// Advice for ranks whose peers have all left normally, and for a group that has failed.
inline constexpr const char* kFewerBatches =
    "Did they have fewer batches, or steps? See join() of DDP, ZeRO and fully_shard. ";
inline constexpr const char* kRebuildGroup =
    "This group can no longer be used: end the program, or destroy the process group and "
    "initialise it again";

// The state that all operations of one c10d group share: whether the group still works, and where
// to look for the reason if not.
struct GroupHealth {
  GroupHealth(c10::intrusive_ptr<c10d::Store> store, RankOf where)
      : board(std::move(store), where), where(where) {}

  FaultBoard board;
  RankOf where;
  // Whether this is torch's fake group, for dry runs, whose other ranks repeat this rank's data.
  bool is_fake = false;

  // Returns what the engine says of a peer that has gone in the middle of what may be waited for;
  // "" while there is none. Empty for an engine whose waits end by themselves then.
  std::function<std::string()> find_lost_peer = {};

  // The health of the group that this one is a part of, if any: a failure announced there ends the
  // waits of both.
  std::shared_ptr<const GroupHealth> whole = nullptr;

  // Returns the failure that a rank has announced, here or to the whole group.
  std::optional<std::string> announced() const noexcept;
  std::optional<std::string> failure() const;
  void set_failure(const std::string& text);
  void clear_failure();
  // Throws the DistBackendError of a group that has failed before.
  void check_usable(const std::string& operation) const;
  // Returns whether a look at the board is due, for callers that do not wait: once a second.
  bool is_look_due();

  // A function that returns why a long wait is in vain, if it is. It belongs to `owner`, and is
  // called by any thread that waits for an operation of the group.
  using Watch = std::function<std::optional<std::string>()>;
  void set_watch(const void* owner, Watch watch);
  void drop_watch(const void* owner);
  std::optional<std::string> waits_in_vain() const;

  // Returns the progress of the group's operations; see crossed_waits.h.
  Progress& progress() { return *progress_; }
  const std::shared_ptr<Progress>& shared_progress() const { return progress_; }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  mutable std::mutex watch_mutex_;
  std::map<const void*, Watch> watches_;
  std::optional<std::string> failure_;
  std::atomic<std::chrono::steady_clock::rep> looked_at_{0};
};

// Returns the health of `communicator`. One without (in a test) gets a fresh one without a Store,
// which watches nothing.
std::shared_ptr<GroupHealth> health_of(const Communicator& communicator);

}  // namespace trireme
