#include <trireme/shm/doctor.h>

#include <trireme/shm/fault.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/shm/liveness.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <new>
#include <system_error>
#include <utility>

namespace trireme::shm {
namespace {

constexpr int32_t kMostRanks = 1 << 20;

// Returns a text without characters that a terminal would obey.
std::string harmless(std::string text) {
  for (char& letter : text)
    if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7f) letter = '?';
  return text;
}

template <size_t N>
std::string text_in(const std::array<char, N>& place) {
  return harmless({place.data(), ::strnlen(place.data(), place.size())});
}

// Returns the command line of that process: words, with spaces between.
std::string command_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
  std::string text(std::istreambuf_iterator<char>(file), {});
  while (text.ends_with('\0')) text.pop_back();
  std::replace(text.begin(), text.end(), '\0', ' ');
  return harmless(std::move(text));
}

std::string working_folder_of(pid_t pid) {
  std::error_code hidden;
  const auto folder =
      std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/cwd", hidden);
  return harmless(folder.string());
}

double seconds_between(int64_t then_ns, int64_t now_ns) {
  return std::max(0.0, (static_cast<double>(now_ns) - static_cast<double>(then_ns)) * 1e-9);
}

std::vector<SeenOperation> operations_in(const RankBlock& block, int64_t now_ns, int64_t history) {
  std::vector<SeenOperation> operations;
  for (size_t i = 0; i < kRecords; ++i) {
    const Record& record = block.records[i];
    if (record.sequence == 0 || record.sequence % kRecords != i) continue;
    SeenOperation seen{record.sequence, record.operation().to_string(),
                       seconds_between(record.started_ns, now_ns), std::nullopt};
    seen.text = harmless(std::move(seen.text));
    const int64_t finished_ns = record.finished_ns.load(std::memory_order_relaxed);
    if (finished_ns != 0) seen.finished_s_ago = seconds_between(finished_ns, now_ns);
    operations.push_back(std::move(seen));
  }
  std::sort(operations.begin(), operations.end(),
            [](const auto& a, const auto& b) { return a.sequence > b.sequence; });
  const auto most = static_cast<size_t>(std::clamp<int64_t>(history, 1, kRecords));
  if (operations.size() > most) operations.resize(most);
  return operations;
}

// Finds the owner of a block among the processes that map it. A later process with the number of a
// dead one maps nothing of it.
void find_process(SeenRank& seen, const FoundSegment& segment,
                  const std::vector<HiddenProcess>& hidden) {
  pid_t owner = 0;
  for (const pid_t holder : segment.holders)
    if (own_number_of(holder) == seen.pid) owner = holder;
  const bool is_hidden = std::any_of(hidden.begin(), hidden.end(),
                                     [&](const auto& process) { return process.pid == seen.pid; });
  if (owner == 0 && is_hidden) owner = seen.pid;
  seen.process = "gone";
  if (owner == 0) return;
  try {
    seen.process = PeerProcess(owner).state();
    seen.pid = owner;
    seen.command = command_of(owner);
    seen.folder = working_folder_of(owner);
  } catch (const Fault&) {  // it went in this moment
  }
}

struct Sighting {
  SeenRank rank;
  std::vector<pid_t> holders;
};

bool overlap(const std::vector<pid_t>& a, const std::vector<pid_t>& b) {
  return std::any_of(a.begin(), a.end(),
                     [&](pid_t pid) { return std::find(b.begin(), b.end(), pid) != b.end(); });
}

struct Circle {
  SeenGroup group;
  std::vector<pid_t> holders;
};

// Groups blocks by their nonce; blocks of a group that is being made belong together if a process
// has mapped both.
std::vector<Circle> circles_of(std::vector<Sighting> sightings) {
  std::vector<Circle> circles;
  for (Sighting& sighting : sightings) {
    const auto circle = std::find_if(circles.begin(), circles.end(), [&](const Circle& known) {
      const SeenRank& first = known.group.ranks.front();
      const bool made = sighting.rank.group != Nonce{};
      return first.group == sighting.rank.group && first.world == sighting.rank.world &&
             (made || overlap(known.holders, sighting.holders));
    });
    Circle& own = circle != circles.end() ? *circle : circles.emplace_back();
    own.group.ranks.push_back(std::move(sighting.rank));
    own.holders.insert(own.holders.end(), sighting.holders.begin(), sighting.holders.end());
  }
  return circles;
}

// Returns whether only children of its ranks hold the group.
bool is_over(const SeenGroup& group) {
  return std::all_of(group.ranks.begin(), group.ranks.end(),
                     [](const SeenRank& rank) { return rank.state == RankState::kLeft; });
}

bool is_asked_for(const Circle& circle, const std::vector<pid_t>& pids) {
  if (pids.empty()) return true;
  std::vector<pid_t> owners;
  for (const SeenRank& rank : circle.group.ranks) owners.push_back(rank.pid);
  return overlap(pids, owners) || overlap(pids, circle.holders);
}

}  // namespace

std::string_view name(RankState state) {
  switch (state) {
    case RankState::kJoining:
      return "joining";
    case RankState::kHere:
      return "here";
    case RankState::kLeft:
      return "left";
    case RankState::kFailed:
      return "failed";
  }
  return "unknown";
}

std::optional<SeenRank> read_block(std::span<const std::byte> bytes, int64_t now_ns,
                                   int64_t history) {
  if (bytes.size() != sizeof(RankBlock)) return std::nullopt;
  alignas(RankBlock) std::array<std::byte, sizeof(RankBlock)> copy;
  std::memcpy(copy.data(), bytes.data(), copy.size());
  const RankBlock& block = *std::launder(reinterpret_cast<const RankBlock*>(copy.data()));
  if (block.layout != RankBlock::kLayout || block.pid <= 0 || block.world <= 0 ||
      block.world > kMostRanks || block.rank < 0 || block.rank >= block.world ||
      block.members < 0 || block.members > block.world)
    return std::nullopt;
  SeenRank seen;
  seen.rank = block.rank;
  seen.world = block.world;
  seen.pid = block.pid;
  seen.state = block.state.load(std::memory_order_relaxed);
  if (seen.state > RankState::kFailed) return std::nullopt;
  if (seen.state != RankState::kJoining) {
    seen.members = block.members;
    seen.group = block.group;
  }
  if (seen.state == RankState::kFailed) seen.failure = text_in(block.failure);
  const uint64_t abandoned = block.abandoned.load(std::memory_order_relaxed);
  if (abandoned > 0 && abandoned >= block.rejoined.load(std::memory_order_relaxed))
    seen.abandoned = text_in(block.reason);
  if (const int64_t since = block.wait_since_ns.load(std::memory_order_relaxed); since != 0) {
    seen.context = text_in(block.context);
    seen.wait_s = seconds_between(since, now_ns);
  }
  seen.round = harmless(round_text(block.progress, block.entered.load(std::memory_order_relaxed)));
  if (const std::string step = step_text(block.progress.steps_begun.load(std::memory_order_relaxed),
                                         block.progress.steps_done.load(std::memory_order_relaxed));
      !step.empty())
    seen.step = step.substr(1);
  seen.arrived = block.arrived.load(std::memory_order_relaxed);
  seen.operations = operations_in(block, now_ns, history);
  return seen;
}

Examination examine_host(const ExamineRequest& request) {
  SegmentScan scan = scan_segments(sizeof(RankBlock), request.way);
  const int64_t now_ns = Clock::now().time_since_epoch().count();
  std::vector<Sighting> sightings;
  for (const FoundSegment& segment : scan.segments) {
    auto rank = read_block(segment.bytes, now_ns, request.history);
    if (!rank) continue;
    find_process(*rank, segment, scan.hidden);
    sightings.push_back({std::move(*rank), segment.holders});
  }
  std::sort(sightings.begin(), sightings.end(),
            [](const Sighting& a, const Sighting& b) { return a.rank.rank < b.rank.rank; });
  Examination found{{}, std::move(scan.hidden), std::move(scan.sealed)};
  for (Circle& circle : circles_of(std::move(sightings))) {
    if (is_over(circle.group) || !is_asked_for(circle, request.pids)) continue;
    judge(circle.group, request.patience);
    found.groups.push_back(std::move(circle.group));
  }
  return found;
}

}  // namespace trireme::shm
