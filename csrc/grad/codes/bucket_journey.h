#pragma once

#include <trireme/comm/pending.h>
#include <trireme/grad/codes/code_exchange.h>
#include <trireme/grad/codes/senders.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// The gradients of one bucket, on their way to other senders and back in up to three stages: the
// sum of a host's ranks, codes between the hosts, the means for all ranks of a host.
struct BucketJourney {
  at::Tensor memory;        // fp32 on the CPU: this rank's gradients, and then the means
  at::Tensor copy_to = {};  // the bucket, where its gradients lie elsewhere
  std::vector<at::Tensor> gradients = {};  // the parts of the memory that are summed up
  std::string label;
  // Starts to exchange the codes of this rank's leg.
  std::function<CodesInFlight()> exchange;
  // The parts of the memory that each leg codes.
  std::vector<std::vector<at::Tensor>> parts_of_legs;
};

// The journeys of one step, in the order of its buckets. Each stage has a communicator of its own,
// on which buckets follow each other in that order on all ranks. A rank that is about to wait first
// brings all buckets that have come so far on their way between the hosts, so that the slow link
// carries one while another one is coded.
class BucketJourneys : public std::enable_shared_from_this<BucketJourneys> {
 public:
  explicit BucketJourneys(const Senders& senders) : senders_(senders) {}

  // Starts; the Pending's wait() leaves the means in the bucket.
  Pending start(BucketJourney journey);

 private:
  class Arrival;
  struct Stages {
    BucketJourney journey;
    Pending inside = {};
    CodesInFlight between = {};
    std::vector<Pending> spread = {};
  };

  bool is_done(size_t index);
  void wait_for(size_t index);
  void send_codes(bool waits);
  void go_on_to(size_t index);
  void spread_means(size_t index);

  const Senders& senders_;
  std::vector<Stages> all_;
  size_t sent_ = 0;     // those whose codes have left
  size_t gone_on_ = 0;  // those whose second journey has begun
  size_t spread_ = 0;   // those whose means are there, or on their way inside of the host
};

}  // namespace trireme
