#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/thread_turn.h>
#include <trireme/memory/buffer_pool.h>
#include <trireme/param/param_group.h>
#include <trireme/param/prefetch.h>
#include <trireme/strategies/fsdp/gradient_delivery.h>
#include <trireme/strategies/fsdp/step_gates.h>
#include <trireme/strategies/fsdp/unit_reducers.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
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
//                  units that the same ranks share
//   post_backward  the unit's inputs have their gradients, or backward is over: as post_forward
//   begin_writing  before the optimizer: waits until no rank reads
//
// (Rajbhandari et al., SC 2020, call it stage 3; torch.distributed.fsdp.fully_shard.) Where ranks
// share a host's memory, unsharding and resharding move nothing, and a rank may skip a unit without
// the others. Elsewhere they gather and free, by [Note: in which order units are gathered]. In both
// a unit that a rank skips contributes zeros as its gradient.

// [Note: passes of several threads]
//
// A unit shows either sharded or unsharded parameters to all threads, and the root has one state of
// an open pass: so passes of several threads come one after the other. A forward of the root, a
// backward and a step wait until those of other threads are over. A unit inside of the root may be
// part of another thread's forward, one that starts threads, which would never be over: it is
// refused. The caller of a step makes sure that no thread evaluates meanwhile, as with any module.
// Where parameters are gathered all ranks must come to their passes in one order, whichever threads
// make them.
//
// A backward on another device than CPU runs in threads of autograd: it waits for no other pass,
// and forwards that are computed again in it belong to it.

// Runs the steps of all units under one root; both front doors wrap it. It is made when the root is
// first used.
//
// Cost per step and rank, N parameters of 4 bytes, P ranks of one host: 4 N bytes of gradients
// deposited, 4 N / P summed up; no collective for parameters, and none between steps but two waits.
// Memory: parameters 4 N per host (and 2 N more under param_dtype=bf16), gradients 4 N / P per rank
// and rings of 8 MiB. Where parameters are gathered: one all_gather per unit in forward and, if it
// reshards, one in backward, 4 N (P - 1) / P bytes received each; one reduce_scatter per bucket of
// 25 MiB, and one small all_reduce. Memory: 16 N / P per rank (with the state of Adam), the two
// largest units (more where ranks use different ones; see prefetch.h), and three buckets. Resharded
// among n ranks backward receives 4 N (n - 1) / n bytes from these, and 4 N / n stay until it is
// over.
//
// Called without the GIL. Passes may come from several threads; see [Note: passes of several
// threads]. Other calls come from the thread that trains.
class TRIREME_API Fsdp : public std::enable_shared_from_this<Fsdp> {
 public:
  struct Request {
    std::vector<std::shared_ptr<ParamGroup>> groups;  // on one device
    std::vector<std::string> names;                   // names of all parameters, group by group
    // The sets of ranks that train units; the first one holds all that train.
    // See [Note: units on several meshes] in unit_reducers.h.
    std::vector<FsdpRanks> ranks;
    // The index into `ranks` of each group; groups of one index have one communicator. All groups
    // are the first set's if it is empty.
    std::vector<size_t> ranks_of = {};
    // All ranks that must agree about the order of gathers; see Prefetch. Needed where groups of
    // several sets of ranks gather.
    std::shared_ptr<Communicator> agrees_with = nullptr;
    // What gradients become on links between senders; themselves if absent.
    std::optional<Compression> compression = {};
  };
  // Makes an Fsdp. Not collective.
  static std::shared_ptr<Fsdp> make(Request request);

  // The unit whose forward begins or ends; `group` is null for a unit without parameters of its
  // own.
  struct Forward {
    std::shared_ptr<ParamGroup> group;
    bool is_root = false;
  };
  // Called before everything that leads to pre_forward(): takes this thread's turn, which ends with
  // its outermost forward. Throws c10::Error for a unit inside of the root during another thread's
  // pass.
  void begin_pass(bool is_root);
  // Called before the forward of a unit. `inputs` are the tensors in the unit's arguments, needed
  // where its parameters are gathered. Throws c10::Error on this rank if a shard was written while
  // others may have read it; c10::DistBackendError as the step gate and the reducer do.
  void pre_forward(const Forward& forward, const std::vector<at::Tensor>& inputs = {});
  // Called after the forward of a unit. `outputs` are the tensors in what the unit returns; see
  // BackwardTrigger::after_forward. Throws c10::DistBackendError as a gather and the reducer do.
  void post_forward(const Forward& forward, const std::vector<at::Tensor>& outputs, bool all_found);

  // Take part in a forward, and in a backward, of the other ranks, without a batch and with zeros
  // as gradients (join). `entry` is the group of the unit at which the forward begins. The
  // gradients of this rank's shards come as from a backward, if the flags of units ask for them.
  void shadow_forward(const std::shared_ptr<ParamGroup>& entry);
  void shadow_backward();
  void shadow_step(const std::shared_ptr<ParamGroup>& root) {
    shadow_forward(root);
    shadow_backward();
  }
  // The callback is called at the beginning of each pass, before this rank waits for others in it;
  // in a backward whose outputs are not known (post_forward) when it averages.
  struct PassStart {
    bool is_backward = false;
    std::shared_ptr<ParamGroup> entry = nullptr;  // group of the unit at which a forward begins
  };
  void tell_passes(std::function<void(const PassStart&)> callback);

  // Called instead of post_forward() when an exception has left the forward of a unit, whether it
  // is caught outside or not. The other ranks, which would wait for this one, are told if units
  // gather and no forward is around this one.
  void abandon_forward(const Forward& forward, const std::string& reason) noexcept;

  // Serve a caller that reads parameters outside of forward, or earlier there. Every rank calls
  // them at the same place where units are gathered. begin_unshard() does not wait until the
  // parameters are there, and does nothing where they are not gathered.
  void unshard(ParamGroup& group);
  void begin_unshard(ParamGroup& group);
  void reshard(ParamGroup& group);
  Prefetch& prefetch() { return prefetch_; }

  // Waits for the writes of all ranks, unless this rank has done so since it wrote.
  void begin_reading();
  // Passes the gate before the optimizer's step and other writes of shards. Waits for all ranks;
  // every rank must come, and may write its own shards until its next forward or unshard(). Throws
  // c10::Error if a shard was written before. After keep_gradients() it throws also if ranks have
  // scaled their gradients differently: on all ranks of the host, which are through the gate then.
  void begin_writing();

  // Returns whether this rank may write its shards now.
  bool is_writing() const { return gates_.is_writing(); }

  // Hands averaged gradients, by the index of their parameters, to `callback`, which keeps them, on
  // the thread that runs backward; see GradientDelivery::take().
  using GradientCallback =
      std::function<void(const std::vector<int64_t>& parameters, std::vector<at::Tensor> parts)>;
  void set_gradient_callback(GradientCallback callback);
  void wait_for_gradients() { delivery_->wait(); }
  // Keeps averaged gradients for a caller without a callback; see GradientDelivery::keep().
  // begin_writing() compares by what factor they were multiplied since.
  void keep_gradients();

  // Sets the sources of memory that is gathered into, and of memory that gradients are sent from;
  // the device's allocator where a source is empty.
  void set_memory_sources(BufferPool::Source gathered, const BufferPool::Source& gradients);
  // Makes backwards only accumulate, and finalize_backward() average what has come together.
  void set_manual_finalization(bool manual);
  void finalize_backward();

  // Drops, after an exception, what forward and backward have left, accumulated gradients included.
  void reset();

  UnitReducers& reducers() { return reducers_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  c10::Device device() const { return groups_.front()->device(); }

 private:
  class PostBackward;
  struct Use;
  explicit Fsdp(const Request& request);
  std::vector<bool> unused_groups() const;
  void begin_forward(const Forward& forward);
  std::shared_ptr<Use> watch_inputs(const std::shared_ptr<ParamGroup>& group,
                                    const std::vector<at::Tensor>& inputs);
  void end_pass() noexcept;
  std::shared_ptr<Use> close(const Forward& forward);
  void watch_outputs(const Forward& forward, const std::vector<at::Tensor>& outputs,
                     const std::shared_ptr<Use>& use);
  void enter_backward();
  void tell_backward();
  void pre_backward(ParamGroup* group, Use* use, const Prefetch::Forward& forward);
  void post_backward(ParamGroup& group, Use& use);
  void compare_gathers(const Request& request);
  void end_pass_of_backward();
  void finish_backward();
  void abandon_backward(const std::string& why) noexcept;
  std::string abandoned_text(const std::string& what) const;
  void tell_gatherers(const std::string& what) noexcept;
  std::set<Communicator*> gatherers() const;
  void reshard_after_backward();
  void check_writes();
  void tell_hook_error(const std::string& what);

  std::vector<std::shared_ptr<ParamGroup>> groups_;
  std::vector<std::string> names_;
  std::shared_ptr<Communicator> communicator_;
  StepGates gates_;
  std::shared_ptr<BufferPool> pool_;
  Prefetch prefetch_;
  UnitReducers reducers_;
  std::shared_ptr<GradientDelivery> delivery_;
  // Forwards that are not over, each inside the one before it.
  struct Open {
    const ParamGroup* group;
    bool is_root;
    std::shared_ptr<Use> use;  // null unless the group gathers
  };
  std::vector<Open> open_;
  ThreadTurn turn_{"fully_shard"};  // held by the thread whose pass is under way
  std::map<const ParamGroup*, int64_t> uses_in_backward_;  // counts those of units that gather
  int64_t backward_ = 0;                                   // counts backwards
  std::set<int64_t> forwards_in_backward_;
  bool in_backward_ = false;
  bool backward_took_turn_ = false;
  bool manual_ = false;
  bool awaits_finalization_ = false;  // a backward came by since finalize_backward()
  std::function<void(const PassStart&)> tell_pass_;
  bool has_told_backward_ = false;
};

}  // namespace trireme
