#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/grad_reducer.h>
#include <trireme/param/param_group.h>
#include <trireme/param/step_gate.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// [Note: a step of fully sharded training]
//
//   pre_forward    of the outermost unit: what this rank wrote is published, what others write is
//                  waited for (param/step_gate.h). Of each unit: its module shows the unsharded
//                  parameters
//   post_forward   its module shows the sharded ones again, unless it is told not to
//   pre_backward   a gradient has reached an output of the unit: its module shows the unsharded
//                  ones, since a checkpoint in it may compute it again
//   backward       grad_hook -> bucket_stream -> each rank's shards of the average, as in ZeRO
//                  stage 2; one reducer for all units
//   post_backward  all modules show the sharded ones
//   begin_writing  before the optimizer: waits until nobody reads
//
// Ranks (Rajbhandari et al., SC 2020, call it stage 3; torch.distributed.fsdp.fully_shard) share
// one host. A unit that a rank skips is nobody's business: its gradient is zeros from there.

// One unit's parameters, of which all ranks say the same. Throws as ParamGroup does, ValueError on
// all ranks for specs that differ. Collective.
TRIREME_API std::shared_ptr<ParamGroup> make_param_group(
    std::vector<ShardedParamSpec> specs, std::shared_ptr<Communicator> communicator);

// The units under one root, made when the root is first used: what both front doors wrap.
//
// Cost per step and rank, N parameters of 4 bytes, P ranks: 4 N bytes of gradients deposited,
// 4 N / P summed up; no collective for parameters, and none between steps but two waits.
// Memory: parameters 4 N per host (and 2 N more under param_dtype=bf16), gradients 4 N / P per rank
// and rings of 8 MiB.
//
// The thread that trains calls these, without the GIL.
class TRIREME_API Fsdp : public std::enable_shared_from_this<Fsdp> {
 public:
  // `names`: of all parameters, group by group. All groups are of `communicator`. Not collective.
  static std::shared_ptr<Fsdp> make(std::vector<std::shared_ptr<ParamGroup>> groups,
                                    std::vector<std::string> names,
                                    std::shared_ptr<Communicator> communicator);

  // Around the forward of a unit; `group` may be null (a unit without parameters of its own).
  // Throws c10::Error on this rank if a shard was written while others may have read it;
  // c10::DistBackendError as the step gate and the reducer do.
  struct Forward {
    std::shared_ptr<ParamGroup> group;
    bool is_root = false;
  };
  void pre_forward(const Forward& forward);
  // `outputs`: the tensors in what the unit returns; see GradReducer::after_forward.
  void post_forward(const Forward& forward, const std::vector<at::Tensor>& outputs, bool all_found);

  // Waits for the writes of all ranks, if this rank has not since it wrote.
  void begin_reading();
  // The gate before the optimizer's step and other writes of shards. Waits for all ranks; every
  // rank must come, and may write its own shards until its next forward or unshard(). Throws
  // c10::Error if a shard was written before.
  void begin_writing();

  // Whether this rank may write its shards now.
  bool is_writing() const { return gate_.is_writing(); }

  // This rank's part of the gradients of some parameters, which have become the .grad of their
  // ShardedParam::sharded(), leaving none there: for a caller who keeps gradients himself.
  std::vector<at::Tensor> take_gradients(const std::vector<int64_t>& parameters) const;

  // Whether backwards average the gradients of each group; without, they accumulate on this rank.
  // The same on all ranks.
  void set_synchronize(const std::vector<bool>& groups);
  // With manual finalization backwards only accumulate, and finalize_backward() averages.
  void set_manual_finalization(bool manual);
  void finalize_backward();

  // After an exception: what forward and backward have left is forgotten.
  void reset();

  GradReducer& reducer() { return *reducer_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  class PostBackward;
  Fsdp(std::vector<std::shared_ptr<ParamGroup>> groups, std::vector<std::string> names,
       std::shared_ptr<Communicator> communicator);
  void begin_forward();
  void pre_backward(ParamGroup* group);
  void await_end_of_backward();
  void post_backward() noexcept;
  void check_writes();

  std::vector<std::shared_ptr<ParamGroup>> groups_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> shards_;  // of all groups
  std::shared_ptr<Communicator> communicator_;
  StepGate gate_;
  std::shared_ptr<GradReducer> reducer_;
  int64_t depth_ = 0;  // of nested forwards
  bool in_backward_ = false;
  bool synchronize_ = true;
  bool manual_ = false;
};

}  // namespace trireme
