#pragma once

#include <trireme/comm/hosts/multi_host_collectives.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// How much longer other hosts wait than the host of a missing rank, which knows the rank and should
// report it first.
constexpr std::chrono::seconds kHostSpeaksFirst{2};

// One collective while it runs, from when all hosts have agreed about it.
class MultiHostCollectives::Scope {
 public:
  Scope(MultiHostCollectives& owner, const shm::Operation& operation, const shm::CallOptions& call);

  // Returns the options of a stage on this host, where others may be waiting for their legs. They
  // are valid as long as this lives.
  shm::CallOptions here() const {
    return {.timeout = std::max(std::chrono::milliseconds(1),
                                std::chrono::ceil<std::chrono::milliseconds>(
                                    deadline_ + 2 * kHostSpeaksFirst - shm::Clock::now())),
            .label = label_};
  }
  void land(HostLeg::Flight& flight) const {
    owner_.leg_->land(flight, deadline_ + kHostSpeaksFirst);
  }

  // Run the stages on this host, or, for a rank alone there, do the same locally. Ranks are counted
  // by their places on the host.
  void reduce_scatter(const shm::Pieces& output, const std::vector<shm::Pieces>& inputs,
                      const shm::ReduceOptions& how) const;
  void all_gather(const std::vector<shm::Pieces>& outputs, const shm::Pieces& input) const;
  void broadcast(const shm::Pieces& memory, int64_t root) const;
  void all_to_all(const std::vector<shm::Pieces>& outputs,
                  const std::vector<shm::Pieces>& inputs) const;
  void barrier() const;
  shm::SharedSegment share_segment(int64_t bytes) const;

 private:
  void tell_host(std::string& complaint) const;

  MultiHostCollectives& owner_;
  shm::Clock::time_point deadline_;
  std::string label_;  // names what the stages are for
};

}  // namespace trireme
