#pragma once

// Gradient path 4/5. In: transport.h  Out: flat_optimizer.h (through .grad)

#include <trireme/grad/bucket.h>
#include <trireme/grad/bucket_layout.h>
#include <trireme/grad/gradient_graphs.h>
#include <trireme/grad/transport.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace trireme {

// What a delivery does, always.
struct DeliveryTraits {
  OwnShards own_shards = {};    // the part of each gradient that this rank keeps
  bool may_defer_sums = false;  // some steps leave their sums to the transport's visit_sums()
  bool may_replan = true;       // the reducer may begin anew with other parameters
  bool keeps_graphs = false;    // the average has a graph if this rank's gradient had one
};

// Where gradients end: what becomes of a sum once it is there, and of the old .grad. Each strategy
// has its own, and asks it about its gradients.
//
// The reducer calls these functions, with its lock held (BackwardTrigger::lock), on the thread that
// runs backward or the training thread.
class TRIREME_API GradDelivery {
 public:
  explicit GradDelivery(DeliveryTraits traits = {}) : traits_(std::move(traits)) {}
  virtual ~GradDelivery() = default;
  GradDelivery(const GradDelivery&) = delete;
  GradDelivery& operator=(const GradDelivery&) = delete;

  const DeliveryTraits& traits() const { return traits_; }

  // Begins with the parameters of a layout, which lives as long as this is used.
  virtual void begin(BucketLayout& layout) { layout_ = &layout; }
  void set_divisor(double divisor) { divisor_ = divisor; }

  // Called before any gradient is accumulated, and before it is known whether its backward
  // synchronizes, if that is decided at parameters. What it throws leaves backward().
  virtual void coming(size_t /*parameter*/) {}
  // Called before a gradient is accumulated outside a synchronized backward.
  virtual void due(size_t /*parameter*/) {}
  // Called after a gradient was accumulated that this backward does not synchronize.
  virtual void accumulated(size_t /*parameter*/) {}
  // Returns whether .grad holds a gradient that came before the hook was there.
  virtual bool has_unseen(size_t /*parameter*/) const { return false; }

  // Called when a synchronized backward begins: first before the layout is made, then when it is.
  virtual void before_backward() {}
  // Returns whether this step may leave its sums to the transport.
  virtual bool defers_step() const { return false; }
  struct Step {
    Transport& transport;
    bool touches_gradients = true;  // false in a shadow step that leaves .grad alone
    bool makes_graph = false;       // backward(create_graph=True)
  };
  virtual void begin_step(const Step& /*step*/) {}

  // Called when a gradient of the step is in .grad, perhaps not for the first time, before it goes
  // to the transport. Takes its graph off it; see [Note: gradients with a graph].
  virtual void came(size_t index) { drop_graph(parameter(index).grad()); }

  // Called when the ranks that share a bucket have its sum. Returns which slots' sums go on to
  // other ranks with the same shards, a flag for each; none if there are no such ranks.
  virtual std::vector<bool> take_sums(Bucket& /*bucket*/) { return {}; }

  // When a parameter's sum becomes .grad: as soon as it is there, when show_sums() has shown it, or
  // not in this step.
  enum class DeliveryTime : uint8_t { kAtOnce, kAfterShown, kHeldBack };
  virtual DeliveryTime delivery_time_of(size_t /*parameter*/) const {
    return DeliveryTime::kAtOnce;
  }
  // Shows waiting sums to the callback that asked for them. Returns whether there were any.
  virtual bool show_sums(const Buckets& /*buckets*/) { return false; }

  // Puts the sum of a slot in its place: some rank used the parameter.
  virtual void deliver(Bucket& bucket, size_t slot) = 0;
  // Restores the .grad of when the step began: no rank used the parameter.
  virtual void restore(Bucket& bucket, size_t slot) { bucket.restore(slot); }
  // Returns whether a parameter's use in this step counts for the next one, too.
  virtual bool still_counts(size_t /*parameter*/, bool /*used*/) const { return false; }
  virtual void after_backward() {}
  // Called when an exception has left the backward; `is_delivered` has one flag per parameter.
  virtual void abandon(const std::vector<bool>& /*is_delivered*/) {}

 protected:
  const at::Tensor& parameter(size_t index) const { return layout_->parameters()[index]; }
  static size_t parameter_of(const Bucket& bucket, size_t slot) {
    return static_cast<size_t>(bucket.plan().slots[slot].parameter);
  }

  BucketLayout* layout_ = nullptr;
  double divisor_ = 1;

 private:
  const DeliveryTraits traits_;
};

}  // namespace trireme
