#include <trireme/strategies/parameter_server/hosts/host_ranks.h>

#include <trireme/comm/host.h>
#include <trireme/shm/host_group.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace trireme::ps {
namespace {

bool holds(const std::vector<int64_t>& ranks, int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::vector<std::vector<int64_t>> hosts_of(Communicator& communicator) {
  if (communicator.world() == 1) return {{0}};
  Host* host = communicator.host();
  TORCH_CHECK_VALUE(
      host != nullptr && host->group().has_memory(),
      error_text(kPsArea, "got a group whose ranks do not share the memory of their host",
                 communicator.rank_of(), "Use backend 'trireme'."));
  return host->group().hosts();
}

}  // namespace

int64_t HostRanks::host_of(int64_t rank) const {
  const auto found = std::find_if(hosts.begin(), hosts.end(),
                                  [rank](const auto& ranks) { return holds(ranks, rank); });
  return found - hosts.begin();
}

std::vector<int64_t> HostRanks::servers_on(int64_t host) const {
  std::vector<int64_t> servers;
  for (const int64_t rank : roles.servers)
    if (host_of(rank) == host) servers.push_back(rank);
  return servers;
}

int64_t HostRanks::server_for(int64_t worker, int64_t host) const {
  const std::vector<int64_t> servers = servers_on(host);
  return servers[static_cast<size_t>(worker) % servers.size()];
}

std::vector<int64_t> HostRanks::served_by(int64_t rank) const {
  std::vector<int64_t> served;
  if (!holds(roles.servers, rank)) return served;
  const int64_t host = host_of(rank);
  for (int64_t worker = 0; worker < static_cast<int64_t>(roles.workers.size()); ++worker) {
    const int64_t its_rank = roles.workers[static_cast<size_t>(worker)];
    if (host_of(its_rank) != host && server_for(worker, host) == rank) served.push_back(worker);
  }
  return served;
}

HostRanks host_ranks_of(Communicator& communicator, const Options& options) {
  const RankOf where = communicator.rank_of();
  HostRanks ranks{hosts_of(communicator), 0, roles_of(options.servers, where)};
  ranks.own = ranks.host_of(where.rank);
  if (ranks.count() == 1) return ranks;
  TORCH_CHECK_VALUE(
      options.backup == 0,
      error_text(
          kPsArea,
          c10::str("got backup=", options.backup, " over ", ranks.count(), " hosts, expected 0"),
          where, "Each host commits clocks by itself: only one can do so without workers."));
  for (int64_t host = 0; host < ranks.count(); ++host)
    TORCH_CHECK_VALUE(!ranks.servers_on(host).empty(),
                      error_text(kPsArea,
                                 c10::str("got no rank that serves on the host of rank ",
                                          ranks.hosts[static_cast<size_t>(host)].front(),
                                          ", expected one on each host"),
                                 where, "Name a rank of each host in servers=[...]."));
  return ranks;
}

}  // namespace trireme::ps
