#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/grad_reducer.h>
#include <trireme/param/param_group.h>
#include <trireme/param/prefetch.h>
#include <trireme/param/step_gate.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace trireme {

// [Note: a step of fully sharded training]
//
//   pre_forward    of the outermost unit: what this rank wrote is published, what others write is
//                  waited for (param/step_gate.h). Of each unit: its parameters are unsharded
//                  (param/prefetch.h), and its module shows them
//   post_forward   they are resharded, and the module shows the sharded ones, unless it is told not
//                  to
//   pre_backward   a gradient has reached an output of the unit: as pre_forward
//   backward       grad_hook -> bucket -> each rank's shards of the average; one reducer for all
//                  units
//   post_backward  the unit's inputs have their gradients, or backward is over: as post_forward
//   begin_writing  before the optimizer: waits until nobody reads
//
// (Rajbhandari et al., SC 2020, call it stage 3; torch.distributed.fsdp.fully_shard.) Where ranks
// share a host's memory, unsharding and resharding move nothing, and a unit that a rank skips is
// nobody's business. Elsewhere they gather and free, by [Note: in which order units are gathered].
// In both a unit that a rank skips contributes zeros as its gradient.

// One unit's parameters, of which all ranks say the same. Throws as ParamGroup does, ValueError on
// all ranks for specs that differ. Collective.
TRIREME_API std::shared_ptr<ParamGroup> make_param_group(ParamGroupRequest request);

// The units under one root, made when the root is first used: what both front doors wrap.
//
// Cost per step and rank, N parameters of 4 bytes, P ranks of one host: 4 N bytes of gradients
// deposited, 4 N / P summed up; no collective for parameters, and none between steps but two waits.
// Memory: parameters 4 N per host (and 2 N more under param_dtype=bf16), gradients 4 N / P per rank
// and rings of 8 MiB. Where parameters are gathered: one all_gather per unit in forward and, if it
// reshards, one in backward, 4 N (P - 1) / P bytes received each; one reduce_scatter per bucket of
// 25 MiB, and one small all_reduce. Memory: 16 N / P per rank (with the state of Adam), the two
// largest units, and two buckets.
//
// The thread that trains calls these, without the GIL.
class TRIREME_API Fsdp : public std::enable_shared_from_this<Fsdp> {
 public:
  struct Request {
    std::vector<std::shared_ptr<ParamGroup>> groups;  // with one communicator of their own
    std::vector<std::string> names;                   // of all parameters, group by group
    std::shared_ptr<Communicator> communicator;       // of all ranks that train
    // Where these are more than share the parameters (HSDP): of the ranks that have the same
    // shards.
    std::shared_ptr<Communicator> replicates_with = nullptr;
  };
  // Not collective.
  static std::shared_ptr<Fsdp> make(Request request);

  // Around the forward of a unit; `group` may be null (a unit without parameters of its own).
  // Throws c10::Error on this rank if a shard was written while others may have read it;
  // c10::DistBackendError as the step gate and the reducer do.
  struct Forward {
    std::shared_ptr<ParamGroup> group;
    bool is_root = false;
  };
  // `inputs`: the tensors in what the unit is called with; needed where its parameters are
  // gathered.
  void pre_forward(const Forward& forward, const std::vector<at::Tensor>& inputs = {});
  // `outputs`: the tensors in what the unit returns; see GradReducer::after_forward.
  void post_forward(const Forward& forward, const std::vector<at::Tensor>& outputs, bool all_found);

  // Takes part in one forward and synchronized backward of the others, without a batch and with
  // zeros as gradients (join); `root`: of the outermost unit. The gradients of this rank's shards
  // come as from a backward.
  void shadow_step(const std::shared_ptr<ParamGroup>& root);

  // An exception has left the outermost forward: where units gather, the other ranks, which would
  // wait for this one, are told.
  void abandon_forward(const std::string& reason) noexcept;

  // For a caller who reads parameters outside of forward, or earlier there. Where units are
  // gathered every rank calls it at the same place; begin_unshard() does not wait until they are
  // there, and has nothing to do elsewhere.
  void unshard(ParamGroup& group);
  void begin_unshard(ParamGroup& group);
  void reshard(ParamGroup& group);
  Prefetch& prefetch() { return prefetch_; }

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
  // What the gradients of each group are divided by; the number of ranks where it is 0. The same on
  // all ranks.
  void set_divide_factors(const std::vector<double>& groups);
  // With manual finalization backwards only accumulate, and finalize_backward() averages.
  void set_manual_finalization(bool manual);
  void finalize_backward();

  // After an exception: what forward and backward have left is forgotten.
  void reset();

  GradReducer& reducer() { return *reducer_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  class PostBackward;
  struct Use;
  // A forward of the outermost unit that backward may come to.
  struct Pass {
    int64_t number = 0;
    Prefetch::Key key;
  };
  explicit Fsdp(Request request);
  void begin_forward(const Forward& forward);
  std::shared_ptr<Use> watch_inputs(const std::shared_ptr<ParamGroup>& group,
                                    const std::vector<at::Tensor>& inputs);
  std::shared_ptr<Use> close_use(const ParamGroup* group);
  void watch_outputs(const Forward& forward, const std::vector<at::Tensor>& outputs,
                     const std::shared_ptr<Use>& use);
  void enter_backward();
  void pre_backward(ParamGroup* group, Use* use, const Pass& pass);
  void post_backward(ParamGroup& group, Use& use);
  void finish_backward();
  void abandon_backward() noexcept;
  void reshard_after_backward();
  void check_writes();

  std::vector<std::shared_ptr<ParamGroup>> groups_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> shards_;  // of all groups
  std::shared_ptr<Communicator> communicator_;
  StepGate gate_;
  Prefetch prefetch_;
  std::shared_ptr<GradReducer> reducer_;
  int64_t depth_ = 0;  // of nested forwards
  // Of a unit that gathers: forwards that are not over, and how many of them backward is in.
  std::map<const ParamGroup*, std::vector<std::shared_ptr<Use>>> open_uses_;
  std::map<const ParamGroup*, int64_t> uses_in_backward_;
  int64_t backward_ = 0;  // counts them
  int64_t forward_ = 0;
  std::set<int64_t> forwards_in_backward_;
  bool in_backward_ = false;
  bool synchronize_ = true;
  bool manual_ = false;
};

}  // namespace trireme
