#include <trireme/comm/host_counters.h>

#include <trireme/comm/translate_faults.h>
#include <trireme/shm/host_group.h>

namespace trireme {

void wake_peers(shm::HostGroup& group) { group.wake_peers(); }

void wait_for_peers(shm::HostGroup& group, const CounterOf& counter_of, uint64_t target,
                    std::string_view name) {
  translate_faults([&] {
    for (int64_t rank = 0; rank < group.world(); ++rank)
      if (rank != group.rank())
        group.wait_beside(rank, counter_of(rank), target, {name, group.timeout()});
  });
}

}  // namespace trireme
