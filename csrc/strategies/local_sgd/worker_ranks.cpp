#include <trireme/strategies/local_sgd/worker_ranks.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/comm/host.h>
#include <trireme/comm/hosts/host_layout.h>
#include <trireme/comm/place_text.h>
#include <trireme/common/error.h>
#include <trireme/shm/host_group.h>
#include <trireme/strategies/local_sgd/round_options.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace trireme {
namespace {

constexpr const char* kPassAcross =
    "Pass across: the ranks that hold the same elements on different workers.";

// Returns a name that no part of these ranks has had: the communicator over them may have been made
// more than once, and each part needs keys of its own in their Store. Collective.
std::string fresh_name(const std::string& what, Communicator& ranks) {
  static std::atomic<int64_t> made{0};
  return what + " " + broadcast_text(std::to_string(made++), 0, ranks, ranks.device());
}

std::shared_ptr<Communicator> split(Communicator& all, const std::vector<int64_t>& members,
                                    const std::string& name) {
  auto made = all.split({members.begin(), members.end()}, name);
  TORCH_CHECK_VALUE(made != nullptr,
                    error_text(kRoundsArea, "got across=None over an engine that splits no groups",
                               all.rank_of(), kPassAcross));
  return made;
}

// Returns what one of these ranks and the first one say where they differ; empty if they agree.
std::string difference_among(const std::shared_ptr<Communicator>& ranks, const char* of,
                             const std::string& description) {
  if (!ranks || ranks->world() == 1) return {};
  const auto found =
      first_difference(distinct_texts({description, "rounds"}, *ranks, ranks->device()));
  if (!found) return {};
  return c10::str("got ", found->first, " on ", of, " 0 and ", found->other, " on ", of, " ",
                  found->rank, ", expected the same on all");
}

}  // namespace

std::vector<std::vector<int64_t>> ranks_by_host(Communicator& all) {
  if (Host* host = all.host()) return host->group().hosts();
  const std::vector<std::string> texts = gather_texts(place_text(), all, all.device());
  std::map<std::string, size_t> known;
  std::vector<std::vector<int64_t>> hosts;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const auto [found, is_first] = known.try_emplace(texts[rank], hosts.size());
    if (is_first) hosts.emplace_back();
    hosts[found->second].push_back(static_cast<int64_t>(rank));
  }
  return hosts;
}

std::shared_ptr<Communicator> counterparts_on_hosts(const std::shared_ptr<Communicator>& all) {
  const HostLayout layout(ranks_by_host(*all), all->rank());
  TORCH_CHECK_VALUE(
      layout.count() > 1,
      error_text(kRoundsArea, "got across=None and ranks on one host, expected several hosts",
                 all->rank_of(), kPassAcross));
  const bool are_even = std::all_of(
      layout.hosts.begin(), layout.hosts.end(),
      [&](const auto& ranks) { return static_cast<int64_t>(ranks.size()) == layout.legs; });
  TORCH_CHECK_VALUE(
      are_even,
      error_text(kRoundsArea,
                 "got across=None and hosts of different numbers of ranks, expected as many on "
                 "each",
                 all->rank_of(), kPassAcross));
  std::vector<int64_t> members;
  for (const auto& host : layout.hosts) members.push_back(host[static_cast<size_t>(layout.place)]);
  const std::string name = fresh_name("workers", *all);
  return split(*all, members, name + " " + std::to_string(layout.place));
}

std::shared_ptr<Communicator> ranks_of_host(const std::shared_ptr<Communicator>& all) {
  const HostLayout layout(ranks_by_host(*all), all->rank());
  const std::string name = fresh_name("worker", *all);
  if (layout.ranks_here() == 1) return nullptr;
  return split(*all, layout.here(), name + " of " + std::to_string(layout.here().front()));
}

std::shared_ptr<Communicator> beside(const std::shared_ptr<Communicator>& ranks) {
  std::vector<int> all(static_cast<size_t>(ranks->world()));
  std::iota(all.begin(), all.end(), 0);
  auto made = ranks->split(all, fresh_name("rounds", *ranks));
  return made ? made : ranks;
}

// A rank that differs is seen by its counterparts, and these tell the other ranks of their worker.
void check_same_rounds(const WorkerRanks& ranks, const RoundsText& text) {
  std::string difference =
      difference_among(ranks.across, "worker", text.of_all + "\n" + text.of_workers);
  if (ranks.inside && ranks.inside->world() > 1) {
    const std::string inside = difference_among(ranks.inside, "rank", text.of_all);
    if (difference.empty()) difference = inside;
    for (const std::string& said : gather_texts(difference, *ranks.inside, ranks.inside->device()))
      if (difference.empty()) difference = said;
  }
  TORCH_CHECK_VALUE(difference.empty(),
                    error_text(kRoundsArea, difference, ranks.across->rank_of(),
                               "Pass the same options, and models of the same parameters, on all "
                               "ranks."));
}

void check_same_weight(const WorkerRanks& ranks, double weight) {
  const std::string difference =
      difference_among(ranks.inside, "rank", c10::str("set_weight(", weight, ")"));
  TORCH_CHECK_VALUE(difference.empty(),
                    error_text(kRoundsArea, difference, ranks.across->rank_of(),
                               "Set the same weight on all ranks of a worker."));
}

}  // namespace trireme
