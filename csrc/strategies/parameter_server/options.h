#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::ps {

// The beginning of every message of the parameter server.
inline constexpr std::string_view kPsArea = "ps";

// The consistency of pulls; see parameter_server.h.
enum class Mode : uint8_t { kBsp, kSsp, kAsync };
// The reaction of the others to the death of a worker, or of a rank that only serves. The death of
// a server that stands for other hosts is fatal under both: its share is gone.
enum class WorkerLoss : uint8_t {
  kRaise,    // the others raise where they wait for it, or pull next
  kContinue  // the others go on as if it had left
};
// The reduction of a clock's gradients that an optimizer sees under bsp.
enum class Reduction : uint8_t {
  kMean,  // their sum, divided by the number of workers whose pushes are in the clock
  kSum
};

// The ranks of the group that only serve.
struct Servers {
  int64_t last = 0;                 // the number of them, the last ones of the group
  std::vector<int64_t> ranks = {};  // these instead, if given
};

struct Options {
  Mode mode = Mode::kBsp;
  // How many clocks a worker may be ahead of the slowest one when it pulls; ssp only.
  int64_t staleness = 0;
  int64_t backup = 0;  // bsp only: the number of workers that no clock waits for
  Servers servers = {};
  std::optional<std::chrono::milliseconds> timeout = {};  // of one wait; unset: the group's
  WorkerLoss on_worker_loss = WorkerLoss::kRaise;
};

// The ranks that work and those that only serve; worker w is the rank workers[w].
struct Roles {
  std::vector<int64_t> workers;
  std::vector<int64_t> servers;

  bool operator==(const Roles&) const = default;
};

// Throws ValueError for servers that are no ranks, are named twice, or are all ranks.
// `where`: this rank, in the group.
TRIREME_API Roles roles_of(const Servers& servers, RankOf where);
// Returns what is wrong with the options for that number of workers; empty if nothing is.
TRIREME_API std::string complaint_about(const Options& options, int64_t workers);
// Returns "bsp", "ssp" or "async".
TRIREME_API std::string_view name_of(Mode mode);
// Returns one line that is equal for equal options.
TRIREME_API std::string to_string(const Options& options, const Roles& roles);

// The most workers with backup: the word that says whose pushes are in a clock has a bit for each.
inline constexpr int64_t kMostWithBackup = 48;

}  // namespace trireme::ps
