#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace trireme {

// The ranks of a group by host, and the ranks that connect the hosts. Equal on all ranks of the
// group, but for `host` and `place`.
//
// Leg j connects the j-th ranks of all hosts. There are as many legs as the smallest host has
// ranks, so that every leg has one end on every host, and data leave a host once:
//
//   hosts {0, 1} {2, 3, 4}    leg 0: ranks 0 and 2    leg 1: ranks 1 and 3
struct HostLayout {
  HostLayout(std::vector<std::vector<int64_t>> hosts_of_group, int64_t rank)
      : hosts(std::move(hosts_of_group)), host(host_of(rank)), place(place_of(rank)) {
    legs = ranks_here();
    for (const auto& ranks : hosts) {
      legs = std::min(legs, static_cast<int64_t>(ranks.size()));
      world += static_cast<int64_t>(ranks.size());
    }
  }

  int64_t count() const { return static_cast<int64_t>(hosts.size()); }
  bool has_leg() const { return place < legs; }
  const std::vector<int64_t>& ranks_of(int64_t which) const {
    return hosts[static_cast<size_t>(which)];
  }
  const std::vector<int64_t>& here() const { return ranks_of(host); }
  int64_t ranks_here() const { return static_cast<int64_t>(here().size()); }
  // Returns the ranks of a host whose data go by that leg: every legs-th.
  std::vector<int64_t> carried(int64_t which, int64_t leg) const {
    std::vector<int64_t> ranks;
    for (int64_t index = leg; index < static_cast<int64_t>(ranks_of(which).size()); index += legs)
      ranks.push_back(ranks_of(which)[static_cast<size_t>(index)]);
    return ranks;
  }
  int64_t host_of(int64_t rank) const {
    int64_t which = 0;
    while (place_on(which, rank) == static_cast<int64_t>(ranks_of(which).size())) ++which;
    return which;
  }
  int64_t place_of(int64_t rank) const { return place_on(host_of(rank), rank); }
  // Calls visit(host) for all hosts but this one.
  template <typename Visit>
  void others(const Visit& visit) const {
    for (int64_t which = 0; which < count(); ++which)
      if (which != host) visit(which);
  }

  std::vector<std::vector<int64_t>> hosts;
  int64_t legs = 0;
  int64_t world = 0;
  int64_t host = 0;   // this rank's, as an index of `hosts`
  int64_t place = 0;  // this rank's, among those of its host

 private:
  int64_t place_on(int64_t which, int64_t rank) const {
    const std::vector<int64_t>& ranks = ranks_of(which);
    return std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  }
};

}  // namespace trireme
