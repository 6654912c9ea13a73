#pragma once

#include <trireme/comm/communicator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace trireme {

// [Note: the order of buckets]
//
// The first synchronized backward launches everything at its end and records in which order
// gradients arrive, how often per parameter (a layer checkpointed twice fires twice), and which do
// not. Rank 0's order is broadcast while the optimizer and the next forward run, and adopted when
// the next backward is armed, which every rank reaches at the same point of its sequence of
// collectives: no rank ever blocks for it. Afterwards every rank knows from the used-map which
// ranks used which parameters and moves parameters that some rank left unused to trailing buckets.

// The order in which gradients arrive, and how often each does in one backward. Not thread-safe;
// its reducer serialises access.
class TRIREME_API ArrivalOrder {
 public:
  // Starts anew, with that many parameters.
  void begin(size_t parameters);
  void begin_step();
  // Counts an arrival. Returns whether it is the last one of this parameter, as in the backward
  // before.
  bool arrived(int64_t parameter);
  // End a step, complete or abandoned.
  void end_step();
  void abandon_step();

  // Returns whether this step is recorded: the order is not known yet.
  bool is_observing() const { return observing_; }
  // Returns whether it was recorded from its beginning, so that send() knows the order.
  bool has_observed() const { return observing_ && has_begun_; }
  // Returns the parameter whose gradient came last, -1 if none has come.
  int64_t last_arrived() const { return last_arrived_; }

  // Sends rank 0's order of the `planned` parameters, as recorded, to all ranks. Parameters that
  // did not arrive follow in the order in which they were planned. `device` is where the group
  // moves tensors. One collective, which the next receive() waits for.
  void send(Communicator& communicator, const std::vector<int64_t>& planned, c10::Device device);
  // Returns the order that was sent, once. If it was given up with the backward of some rank this
  // throws what the collective did, and the next step is recorded again.
  std::vector<int64_t> wait();
  // Returns it in a later backward: nothing if none was sent, or it was given up.
  std::optional<std::vector<int64_t>> receive(const Communicator& communicator);

 private:
  std::vector<int64_t> seen_order(const std::vector<int64_t>& planned) const;

  bool observing_ = true;
  bool has_begun_ = false;  // a step, since begin()
  std::vector<int64_t> arrivals_;
  std::vector<int32_t> times_expected_;  // per backward, as recorded in the last one
  std::vector<int32_t> times_seen_;
  int64_t last_arrived_ = -1;
  at::Tensor sent_;
  Pending sending_;
};

}  // namespace trireme
