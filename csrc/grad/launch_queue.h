#pragma once

#include <trireme/grad/bucket_layout.h>
#include <trireme/grad/grad_delivery.h>
#include <trireme/grad/step_report.h>
#include <trireme/grad/transport.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// Takes the buckets of a step to their transport, in the order of the plan, and their sums to the
// delivery. Not thread-safe; its reducer serialises access.
class TRIREME_API LaunchQueue {
 public:
  // All arguments must outlive this.
  LaunchQueue(BucketLayout& layout, GradDelivery& delivery, StepClock& clock)
      : layout_(layout), delivery_(delivery), clock_(clock) {}

  struct Step {
    Transport* transport = nullptr;
    double scale = 1;            // gradients are multiplied by it
    bool shadow = false;         // this rank contributes zeros
    bool delivers_late = false;  // the caller decides when anything may be delivered
  };
  // Begins a step in which each bucket waits for the gradients of its parameters that are trained
  // and not `unused` (one flag per parameter; empty: none is). Buckets have begun theirs.
  void begin(const Step& step, const std::vector<bool>& unused);

  // Wait for one more gradient of a bucket, or one fewer.
  void wait_for_one_more(size_t bucket) { ++flights_[bucket].waiting; }
  void stop_waiting_for_one(size_t bucket) { --flights_[bucket].waiting; }
  bool has_launched(size_t bucket) const { return bucket < next_launch_; }
  // Returns whether the next bucket waits for no gradient.
  bool can_launch() const {
    return next_launch_ < flights_.size() && flights_[next_launch_].waiting <= 0;
  }
  // Launches buckets that wait for no gradient, and delivers sums that have come meanwhile.
  void launch_ready();
  // Launches everything: no gradient comes any more.
  void launch_rest();
  // Waits for everything that is in flight, and brings every .grad that this rank used to its final
  // value, except those that deliver_shown() delivers, when sums have been shown.
  void deliver_rest();
  void deliver_shown();
  // Delivers the gradients that only other ranks used, and restores unused ones, as the map says.
  void deliver_by_map();
  // Reduces and delivers gradients outside the plan of this step, over `transport`: those of
  // `parameters` that some rank used.
  void reduce_extra_bucket(Transport& transport, double scale,
                           const std::vector<int64_t>& parameters, const std::vector<bool>& used);
  // Forgets the buckets in flight.
  void drop() { flights_.clear(); }

  // Returns one flag per parameter: whether its .grad is final.
  const std::vector<bool>& is_delivered() const { return is_delivered_; }
  // Returns whether the .grad of all parameters in the plan of the step is final.
  bool has_delivered_all() const;
  void set_delivered_callback(std::function<void(const std::vector<int64_t>&)> callback) {
    delivered_ = std::move(callback);
  }

 private:
  struct Flight {
    int64_t waiting = 0;  // parameters whose gradient is still to come
    Pending pending;
    Pending outer;
  };

  void launch(size_t bucket);
  void keep_few_in_flight();
  void finish_reduction(size_t bucket);
  void deliver_reduced();
  void deliver_arrived(size_t bucket);
  void deliver_used(Bucket& bucket, GradDelivery::DeliveryTime turn);
  Bucket& bucket_at(size_t bucket) const { return *layout_.buckets()[bucket]; }

  BucketLayout& layout_;
  GradDelivery& delivery_;
  StepClock& clock_;
  std::function<void(const std::vector<int64_t>&)> delivered_;
  Step step_;
  std::vector<Flight> flights_;
  size_t next_launch_ = 0;
  size_t next_reduced_ = 0;
  size_t next_deliver_ = 0;
  bool waits_in_vain_ = false;
  std::vector<bool> is_delivered_;
};

}  // namespace trireme
