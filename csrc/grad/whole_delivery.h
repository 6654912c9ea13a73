#pragma once

#include <trireme/grad/backward_trigger.h>
#include <trireme/grad/grad_delivery.h>

#include <memory>
#include <vector>

namespace trireme {

// Every rank keeps all of the average, as the .grad of its parameter: the delivery of DDP. See
// [Note: who owns a gradient's memory] in grad/bucket.h, and [Note: gradients with a graph].
class TRIREME_API WholeDelivery : public GradDelivery {
 public:
  // `as_bucket_view` replaces also a .grad that existed before, which otherwise keeps its identity.
  explicit WholeDelivery(const std::shared_ptr<BackwardTrigger>& trigger,
                         bool as_bucket_view = false)
      : GradDelivery({.keeps_graphs = true}),
        as_bucket_view_(as_bucket_view),
        graphs_([trigger = std::weak_ptr(trigger)] {
          if (const auto alive = trigger.lock()) alive->output_gradient_arrived();
        }) {}

  void begin(BucketLayout& layout) override {
    GradDelivery::begin(layout);
    graphs_.begin(layout.parameters().size());
  }
  void begin_step(const Step& step) override {
    touches_gradients_ = step.touches_gradients;
    makes_graph_ = step.makes_graph;
  }
  void came(size_t index) override {
    if (makes_graph_) graphs_.take(index, parameter(index).grad());
  }
  void deliver(Bucket& bucket, size_t slot) override {
    if (!touches_gradients_) return;
    const size_t index = parameter_of(bucket, slot);
    came(index);  // what was in .grad before
    const at::Tensor earlier = average_with_graph(parameter(index).grad());
    bucket.deliver(slot, as_bucket_view_);
    if (makes_graph_) graphs_.give_back(index, parameter(index).grad(), 1 / divisor_);
    if (earlier.defined()) copy_graph(earlier, parameter(index).grad());
  }
  void abandon(const std::vector<bool>& /*is_delivered*/) override {
    for (size_t i = 0; i < layout_->parameters().size(); ++i)
      graphs_.give_back(i, parameter(i).grad(), /*factor=*/1);
  }

 protected:
  bool touches_gradients() const { return touches_gradients_; }

 private:
  bool as_bucket_view_;
  bool touches_gradients_ = true;
  bool makes_graph_ = false;
  GradientGraphs graphs_;
};

}  // namespace trireme
