#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/rank_block.h>
#include <trireme/shm/segment_scan.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

namespace trireme::shm {

// [Note: who is where]
//
// The state that ranks show to their peers also serves an onlooker from outside. Every rank of a
// group maps the blocks of all, so one process that is left is enough to read what each rank was
// doing, a killed one too. The ranks do nothing for it: they may hang, be stopped or hold a lock.
// An onlooker reads a copy made while others write, maybe from a foreign program: every number is
// checked before it is used.

// A collective of a rank.
struct SeenOperation {
  uint64_t sequence = 0;
  std::string text;  // Operation::to_string()
  double started_s_ago = 0;
  std::optional<double> finished_s_ago;  // empty while it runs
};

struct SeenRank {
  int64_t rank = -1;  // in the group
  int64_t world = 0;
  int64_t members = 0;  // ranks on this host; 0 until they know each other
  pid_t pid = 0;        // as this process calls it; as it calls itself once it is gone
  std::string process;  // PeerProcess::state(): "running", "sleeping", "stopped", "gone", ...
  RankState state = RankState::kJoining;
  std::string failure;                    // kFailed: the reason that it gave
  std::string abandoned;                  // why it left the ranks' work, until it is back
  std::vector<SeenOperation> operations;  // the newest first
  std::string round;                      // round_text(), if a round was the last it did
  std::string step;                       // "in step 10", "after step 9"
  std::string command;                    // its command line
  std::string folder;                     // its working folder; empty if it may not be seen
  std::string context;                    // what it waits for beside the collectives, if it waits
  double wait_s = 0;                      // for how long
  uint64_t arrived = 0;                   // see RankBlock
  uint64_t behind = 0;                    // collectives, compared with the furthest rank
  Nonce group{};

  uint64_t sequence() const { return operations.empty() ? 0 : operations.front().sequence; }
  bool is_inside() const { return !operations.empty() && !operations.front().finished_s_ago; }
};

struct SeenGroup {
  std::vector<SeenRank> ranks;  // ascending
  std::string verdict;          // one sentence
  std::vector<pid_t> suspects;  // processes to look at next: alive, and waited for
  bool is_well = true;          // no rank is dead, stopped, failed or late
};

struct ExamineRequest {
  std::vector<pid_t> pids{};  // groups with one of these only; empty: all
  // The longest wait for another rank in a healthy job.
  std::chrono::milliseconds patience = std::chrono::seconds(5);
  int64_t history = 1;  // operations per rank, at most kRecords
  ReadThrough way = ReadThrough::kMemory;
};

struct Examination {
  std::vector<SeenGroup> groups;
  std::vector<HiddenProcess> hidden;  // see SegmentScan
  std::vector<HiddenProcess> sealed;
};

// Looks at all groups on this host whose processes it may read. Takes milliseconds; changes
// nothing; may be called by any process, a rank too.
TRIREME_API Examination examine_host(const ExamineRequest& request);

// Reads the bytes of a RankBlock, all but the process. Returns nothing if they are no block of this
// layout.
TRIREME_API std::optional<SeenRank> read_block(std::span<const std::byte> bytes, int64_t now_ns,
                                               int64_t history);

// Fills the verdict, suspects and is_well of a group, and how far each rank is behind.
TRIREME_API void judge(SeenGroup& group, std::chrono::milliseconds patience);

// Returns "here", "left", "failed", "joining".
TRIREME_API std::string_view name(RankState state);

}  // namespace trireme::shm
