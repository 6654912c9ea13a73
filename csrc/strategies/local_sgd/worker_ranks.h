#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Where this rank is among workers.
struct WorkerRanks {
  // Joins the ranks that hold the same elements on different workers, in the workers' order.
  std::shared_ptr<Communicator> across;
  // Joins the ranks of this worker; null for a rank alone.
  std::shared_ptr<Communicator> inside = nullptr;
  // Whether each rank of this worker has all of each parameter. Each then sends some parameters for
  // all of them.
  bool have_all = false;
};

// Returns the ranks of `all` by host, hosts in the order of their first ranks. Collective.
TRIREME_API std::vector<std::vector<int64_t>> ranks_by_host(Communicator& all);
// Returns a communicator of the ranks that have this rank's place on all hosts of `all`, in the
// order of the hosts. Throws ValueError, naming `across`, for one host, and for hosts of different
// numbers of ranks. Collective.
TRIREME_API std::shared_ptr<Communicator> counterparts_on_hosts(
    const std::shared_ptr<Communicator>& all);
// Returns a communicator of the ranks of this rank's host, for C++ programs; null for a rank alone.
// Collective.
TRIREME_API std::shared_ptr<Communicator> ranks_of_host(const std::shared_ptr<Communicator>& all);

// Returns a communicator of the same ranks, made anew, for what travels beside training; the same
// one if the engine can make none. Collective.
TRIREME_API std::shared_ptr<Communicator> beside(const std::shared_ptr<Communicator>& ranks);

// What ranks say of their rounds, line by line.
struct RoundsText {
  std::string of_all;      // the same on all ranks of all workers
  std::string of_workers;  // the same on the ranks that have one place on different workers
};
// Throws ValueError, on all ranks of all workers and naming both, if some say something else.
// Collective.
TRIREME_API void check_same_rounds(const WorkerRanks& ranks, const RoundsText& text);
// Throws ValueError, on all ranks of this worker and naming both, if they have set other weights.
// Collective over them.
TRIREME_API void check_same_weight(const WorkerRanks& ranks, double weight);

}  // namespace trireme
