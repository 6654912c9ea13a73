#include <trireme/comm/host_counters.h>

#include <trireme/comm/torchs_words.h>
#include <trireme/shm/host_group.h>

namespace trireme {

void wake_peers(shm::HostGroup& group) { group.wake_peers(); }

void wait_for_peers(shm::HostGroup& group, const CounterOf& counter_of, uint64_t target,
                    std::string_view name) {
  in_torchs_words([&] {
    for (int64_t rank = 0; rank < group.world(); ++rank)
      if (rank != group.rank())
        group.wait_beside(rank, counter_of(rank), target, {name, group.timeout()});
  });
}

}  // namespace trireme
