#include <trireme/strategies/parameter_server/options.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace trireme::ps {

std::string_view name_of(Mode mode) {
  return mode == Mode::kBsp ? "bsp" : mode == Mode::kSsp ? "ssp" : "async";
}

Roles roles_of(const Servers& servers, RankOf where) {
  const int64_t world = where.world;
  const auto refuse = [&](const std::string& got, std::string_view next_step) {
    TORCH_CHECK_VALUE(false, error_text(kPsArea, got, where, next_step));
  };
  std::vector<int64_t> serve = servers.ranks;
  if (serve.empty()) {
    if (servers.last < 0)
      refuse(c10::str("got servers=", servers.last, ", expected 0 or more"),
             "0 means that no rank only serves.");
    for (int64_t rank = std::max<int64_t>(0, world - servers.last); rank < world; ++rank)
      serve.push_back(rank);
  }
  std::sort(serve.begin(), serve.end());
  for (size_t i = 0; i < serve.size(); ++i) {
    if (serve[i] < 0 || serve[i] >= world)
      refuse(c10::str("got rank ", serve[i], " as a server, expected ranks in [0, ", world, ")"),
             "Name ranks of the group.");
    if (i > 0 && serve[i] == serve[i - 1])
      refuse(c10::str("got rank ", serve[i], " twice as a server, expected it once"),
             "Name each rank once.");
  }
  if (static_cast<int64_t>(serve.size()) >= world)
    refuse(c10::str("got ", serve.size(), " servers among ", world,
                    " ranks, expected at least one rank that works"),
           "Name fewer servers, or start more ranks.");
  Roles roles;
  for (int64_t rank = 0; rank < world; ++rank) {
    const bool serves = std::binary_search(serve.begin(), serve.end(), rank);
    (serves ? roles.servers : roles.workers).push_back(rank);
  }
  return roles;
}

std::string complaint_about(const Options& options, int64_t workers) {
  const auto mode = name_of(options.mode);
  if (options.staleness < 0) return c10::str("staleness=", options.staleness, ", expected >= 0");
  if (options.staleness != 0 && options.mode != Mode::kSsp)
    return c10::str("staleness=", options.staleness, " under mode='", mode,
                    "', expected 0: only ssp has a bound");
  if (options.backup != 0 && options.mode != Mode::kBsp)
    return c10::str("backup=", options.backup, " under mode='", mode,
                    "', expected 0: only bsp commits clocks");
  if (options.backup < 0 || options.backup >= workers)
    return c10::str("backup=", options.backup, ", expected one in [0, ", workers, ")");
  if (options.backup > 0 && workers > kMostWithBackup)
    return c10::str("backup=", options.backup, " with ", workers, " workers, expected at most ",
                    kMostWithBackup, " workers");
  if (options.timeout && options.timeout->count() <= 0)
    return c10::str("timeout=", options.timeout->count(), " ms, expected a positive one");
  return {};
}

std::string to_string(const Options& options, const Roles& roles) {
  std::string text = c10::str(
      "mode='", name_of(options.mode), "', staleness=", options.staleness,
      ", backup=", options.backup,
      ", on_worker_loss=", options.on_worker_loss == WorkerLoss::kRaise ? "'raise'" : "'continue'",
      ", servers=[");
  for (size_t i = 0; i < roles.servers.size(); ++i)
    text += c10::str(i == 0 ? "" : ", ", roles.servers[i]);
  return text + "]";
}

}  // namespace trireme::ps
