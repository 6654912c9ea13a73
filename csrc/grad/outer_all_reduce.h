#pragma once

#include <trireme/comm/communicator.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// The second stage of a reduction in two: sums of the ranks that share parameters are summed up
// over the ranks that hold the same shards (HSDP). It stands by itself so that work on the slower
// links (compression, a push to a server) can be put around it. Between hosts, where both stages
// overlap by chunks below one verb, they are in comm/hosts.
class TRIREME_API OuterAllReduce {
 public:
  virtual ~OuterAllReduce() = default;
  // Starts to sum `sums` up in place. The tensors stay alive as long as the Pending does.
  virtual Pending sum(std::vector<at::Tensor> sums, const std::string& label) = 0;
  virtual void announce_failure(const std::string& text) noexcept = 0;
};

// Makes a stage that all-reduces over `replicas`.
TRIREME_API std::unique_ptr<OuterAllReduce> make_replica_sum(
    std::shared_ptr<Communicator> replicas);

}  // namespace trireme
