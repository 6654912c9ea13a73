#pragma once

#include <trireme/common/error.h>
#include <trireme/memory/stream_handoff.h>
#include <trireme/memory/tensor_samples.h>
#include <trireme/param/param_group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace trireme {

// [Note: gradients that a rank scales alone]
//
// LibTorch's clip_grad_norm_ knows nothing of shards: each rank would clip by the norm of its own,
// and it writes through `.data()`, which no version tells. So samples of each gradient are kept
// when it is delivered, and each rank tells at the gate by which one factor all of them have been
// multiplied since. Factors that differ are refused on all ranks of the host. A rank tells none if
// it has no samples, or changed them in another way: by element (clip_grad_value_, noise), or by
// parameter. Scaling alike on all ranks passes: model->clip_grad_norm_, the inverse of a loss
// scale.

// Brings this rank's part of averaged gradients from the leaves that the reducers fill to where the
// optimizer works, which may be CPU memory. Parameters are counted over all groups.
class TRIREME_API GradientDelivery : public std::enable_shared_from_this<GradientDelivery> {
 public:
  explicit GradientDelivery(const std::vector<std::shared_ptr<ParamGroup>>& groups);

  // Takes gradients out of the .grad of their ShardedParam::gradient_leaf(), for a caller that
  // keeps them. Those of offloaded shards are copied into CPU memory. They are there when backward,
  // or the call that delivers them outside of one, is over; or when wait() returns.
  std::vector<at::Tensor> take(const std::vector<int64_t>& parameters);
  void wait() { copies_.wait(); }
  // Keeps gradients for a caller that does not: those of offloaded shards become the .grad of
  // ShardedParam::sharded(), too, or are added to it, and factor() samples all of them.
  void keep(const std::vector<int64_t>& parameters);

  // Returns by which factors all kept gradients may have been multiplied since they were delivered.
  FactorRange factor() const;
  void forget() { delivered_.clear(); }

 private:
  struct Owner {
    ParamGroup* group;
    int64_t parameter;  // its index in the group
  };
  const ShardedParam& param(int64_t index) const {
    const Owner& owner = owners_[static_cast<size_t>(index)];
    return owner.group->params()[static_cast<size_t>(owner.parameter)];
  }
  bool is_offloaded(int64_t index) const {
    return param(index).spec().offload != ShardOffload::kNone;
  }
  void wait_at_the_end();
  void receive(const std::vector<int64_t>& parameters);
  SampledMemory memory_of(int64_t parameter) const;

  std::vector<Owner> owners_;
  StreamHandoff copies_;
  TensorSamples delivered_;
  int64_t waiting_task_ = -1;  // the backward that waits for copies at its end
};

// Throws c10::Error where the factors `of_all` ranks have none in common; `own` is this rank's.
TRIREME_API void check_factor(const FactorRange& own, const FactorRange& of_all, RankOf where);

}  // namespace trireme
