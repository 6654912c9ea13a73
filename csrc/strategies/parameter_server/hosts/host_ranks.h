#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/strategies/parameter_server/options.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::ps {

// The ranks of a group by the host whose memory they share, and which of them work and serve.
struct HostRanks {
  std::vector<std::vector<int64_t>> hosts;  // ranks, ascending
  int64_t own = 0;                          // this rank's host
  Roles roles;

  int64_t count() const { return static_cast<int64_t>(hosts.size()); }
  int64_t host_of(int64_t rank) const;
  // Returns the ranks of a host that only serve.
  std::vector<int64_t> servers_on(int64_t host) const;
  // Returns the rank that serves a worker on a host that is not its own.
  int64_t server_for(int64_t worker, int64_t host) const;
  // Returns the workers of other hosts that a rank serves.
  std::vector<int64_t> served_by(int64_t rank) const;
  bool is_first_on_host(int64_t rank) const {
    return hosts[static_cast<size_t>(own)].front() == rank;
  }
};

// Throws ValueError if ranks do not share the memory of their host, and, on several hosts, if one
// has no rank that serves, or for backup workers.
HostRanks host_ranks_of(Communicator& communicator, const Options& options);

}  // namespace trireme::ps
