#pragma once

// Gradient path 4/5. In: wire.h (through grad_reducer.h)  Out: flat_optimizer.h (through .grad)

#include <trireme/grad/bucket.h>
#include <trireme/grad/bucket_layout.h>
#include <trireme/grad/gradient_graphs.h>
#include <trireme/grad/wire.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace trireme {

// Where gradients end: what becomes of a sum once it is there, and of what .grad held before. Each
// strategy has its own, and asks it what it wants to know of its gradients.
//
// The reducer calls these, with its lock held (Arming::lock), on the thread that runs backward or
// that trains.
class TRIREME_API Landing {
 public:
  virtual ~Landing() = default;

  // Says which part of each gradient this rank keeps; the same one always.
  virtual OwnShards own_shards() const { return {}; }
  // Says whether some steps leave their sums to the wire's hand_out(); the same always.
  virtual bool may_defer_sums() const { return false; }
  // Says whether the reducer may begin anew with other parameters.
  virtual bool may_replan() const { return true; }

  // Begins with the parameters of a layout, which lives as long as this is asked.
  virtual void begin(BucketLayout& layout) { layout_ = &layout; }
  void set_divisor(double divisor) { divisor_ = divisor; }

  // A gradient is about to be accumulated where no backward synchronizes.
  virtual void due(size_t /*parameter*/) {}
  // A gradient was accumulated that this backward does not synchronize.
  virtual void accumulated(size_t /*parameter*/) {}
  // Says whether .grad holds a gradient that came before anybody watched.
  virtual bool has_unseen(size_t /*parameter*/) const { return false; }

  // A backward that synchronizes begins: first before the layout is made, then when it is.
  virtual void before_backward() {}
  // Says whether this step may leave its sums to the wire.
  virtual bool defers_step() const { return false; }
  struct Step {
    Wire& wire;
    bool touches_gradients = true;  // false in a shadow step that leaves .grad alone
    bool makes_graph = false;       // backward(create_graph=True)
  };
  virtual void begin_step(const Step& /*step*/) {}

  // Says whether the average has a graph where this rank's gradient had one.
  virtual bool keeps_graphs() const { return false; }
  // A gradient of the step is in .grad, perhaps not for the first time, and goes to the wire next.
  // Takes its graph off it; see [Note: gradients with a graph].
  virtual void came(size_t index) { drop_graph(parameter(index).grad()); }

  // The ranks that share a bucket have its sum. Returns what goes on to those that hold the same
  // shards, if others do.
  virtual std::vector<at::Tensor> take_sums(Bucket& /*bucket*/) { return {}; }

  // When a parameter's sum becomes .grad: as soon as it is there, when show_sums() has shown it, or
  // not in this step.
  enum class Turn : uint8_t { kAtOnce, kAfterShown, kHeldBack };
  virtual Turn turn_of(size_t /*parameter*/) const { return Turn::kAtOnce; }
  // Shows sums that wait for it to who asked for them. Returns whether there were any.
  virtual bool show_sums(const Buckets& /*buckets*/) { return false; }

  // Puts the sum of a slot where it belongs: some rank used the parameter.
  virtual void deliver(Bucket& bucket, size_t slot) = 0;
  // Makes .grad what it was when the step began: no rank used the parameter.
  virtual void restore(Bucket& bucket, size_t slot) { bucket.restore(slot); }
  // Says whether what was used in this step counts for the next one, too.
  virtual bool still_counts(size_t /*parameter*/, bool /*used*/) const { return false; }
  virtual void after_backward() {}
  // An exception has left the backward; `is_delivered` has one flag per parameter.
  virtual void abandon(const std::vector<bool>& /*is_delivered*/) {}

 protected:
  const at::Tensor& parameter(size_t index) const { return layout_->parameters()[index]; }
  static size_t parameter_of(const Bucket& bucket, size_t slot) {
    return static_cast<size_t>(bucket.plan().slots[slot].parameter);
  }

  BucketLayout* layout_ = nullptr;
  double divisor_ = 1;
};

}  // namespace trireme
