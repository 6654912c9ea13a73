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

// Begins every message of the room.
inline constexpr std::string_view kPsArea = "ps";

// Says what a pull may return; see parameter_server.h.
enum class Mode : uint8_t { kBsp, kSsp, kAsync };
// Says what becomes of the others when a worker dies, or a rank that only serves. A server that
// stands for other hosts is fatal under both: its share is gone.
enum class WorkerLoss : uint8_t {
  kRaise,    // they raise where they wait for it, or pull next
  kContinue  // they go on as if it had left
};
// Says what an optimizer under bsp sees of the gradients of a clock.
enum class Reduction : uint8_t {
  kMean,  // their sum, divided by the number of workers that the clock was closed with
  kSum
};

// Says which ranks of the group only serve.
struct Servers {
  int64_t last = 0;                 // so many, the last ones of the group
  std::vector<int64_t> ranks = {};  // these, if there are any
};

struct Options {
  Mode mode = Mode::kBsp;
  // How many clocks a worker may be ahead of the slowest one when it pulls; ssp only.
  int64_t staleness = 0;
  int64_t backup = 0;  // bsp only: a clock closes without so many workers
  Servers servers = {};
  std::optional<std::chrono::milliseconds> timeout = {};  // limits one wait; unset: the group's
  WorkerLoss on_worker_loss = WorkerLoss::kRaise;
};

// Says which ranks work and which only serve; worker w is the rank workers[w].
struct Roles {
  std::vector<int64_t> workers;
  std::vector<int64_t> servers;

  bool operator==(const Roles&) const = default;
};

// Throws ValueError for servers that are no ranks, are named twice, or are all ranks.
// `where`: this rank, in the group.
TRIREME_API Roles roles_of(const Servers& servers, RankOf where);
// Returns what is wrong with the options for so many workers; empty if nothing is.
TRIREME_API std::string complaint_about(const Options& options, int64_t workers);
// Returns "bsp", "ssp" or "async".
TRIREME_API std::string_view name_of(Mode mode);
// Returns one line that is equal for equal options.
TRIREME_API std::string to_string(const Options& options, const Roles& roles);

// No more workers can be told apart by the word that says whose pushes a clock was closed with.
inline constexpr int64_t kMostWithBackup = 48;

}  // namespace trireme::ps
