#pragma once

#include <trireme/optim/grad_norm.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/fsdp/fsdp.h>
#include <trireme/strategies/fsdp/offload_plan.h>
#include <trireme/strategies/fsdp/unit_hold.h>
#include <trireme/sync/join.h>

#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

struct FsdpOptions {
  // The dtype that forward and backward read, and that of gradients on the wire; the
  // parameters' own if absent.
  std::optional<at::ScalarType> param_dtype = {};
  std::optional<at::ScalarType> reduce_dtype = {};
  // The dtype of the module's floating-point outputs; they stay as they come if it is absent.
  std::optional<at::ScalarType> output_dtype = {};
  // Whether floating-point inputs are cast to param_dtype.
  bool cast_forward_inputs = true;
  // Whether the unit is resharded after forward, as in Python. If absent it is, unless it is the
  // outermost unit. Changes nothing between ranks of one host.
  std::optional<bool> reshard_after_forward = {};
  // All ranks that train; those of the last trireme::init() if null. An inner unit may have one of
  // some of the outermost unit's ranks, which share the unit with each other only (experts); its
  // gradients are averaged over these. Units of the same ranks get the same one: split_contiguous()
  // and split_strided() (comm/subgroups.h) make them.
  std::shared_ptr<Communicator> communicator = nullptr;
  // The number of neighbouring ranks among which the parameters are sharded (HSDP). The next ones
  // have the same shards again, and gradients are averaged over all. 0: all ranks.
  int64_t shard_among = 0;
  // A second communicator of the ranks that share the parameters, for gathers, the same for all
  // units that they share; duplicate() theirs (comm/subgroups.h) if null. Used only where
  // parameters are gathered.
  std::shared_ptr<Communicator> gathers_with = nullptr;
  // The number of neighbouring ranks among which the unit is resharded after forward: backward
  // gathers it from these only, and each of them keeps a part of it until then (see [Note: pieces]
  // in param/gathered_params.h). 0 and the number of ranks: all of them; 1: it is not resharded.
  // Replaces reshard_after_forward. Equal on all ranks; used only where parameters are gathered.
  int64_t reshard_among = 0;
  // The communicator of these ranks, the same for all units; split_contiguous() the ranks that
  // share parameters if null.
  std::shared_ptr<Communicator> reshards_with = nullptr;
  // The communicator that scatters gradients, the same for all units of the same ranks; that of the
  // ranks that share the parameters if null. Used only where parameters are gathered. A
  // CustomCommunicator (comm/c10d/custom_communicator.h) around theirs, here and in gathers_with,
  // brings collectives of one's own.
  std::shared_ptr<Communicator> scatters_with = nullptr;
  // Chooses the dimension of a parameter that is sharded, below 0 from behind; the first one if
  // empty. Equal on all ranks.
  std::function<int64_t(const std::string& name, const at::Tensor& parameter)> shard_dim = {};
  // The part of the unit that lies in CPU memory. On CPU it does nothing, and rank 0 says so once.
  std::optional<Offload> offload = {};
  // What gradients become on links between senders (grad/codes/compression.h): all ranks or, under
  // shard_among, those that have the same shards. Given to the outermost unit, whose inner ones
  // have none or the same. Themselves if absent.
  std::optional<Compression> compression = {};
};

// [Note: a sharded C++ module]
//
// C++ modules have no forward hooks, so a unit is a module around another:
//
//   inner    the user's module, which computes. Its parameters stay the same tensors for ever, over
//            the memory of the host: unsharded. It is held, not registered. Where ranks share no
//            memory they have some only while the unit is unsharded
//   mirror   what is registered in its place: the same tree of names, with this rank's shards as
//            parameters, inner's own buffers, and the units in it themselves
//
// So parameters(), named_parameters() and zero_grad() of any module around it see shards, under the
// names of the plain model, and an optimizer is made of them as of any. Before it writes them it
// passes a gate: trireme::step(optimizer), or an optimizer of optim/flat_optimizer.h, which does so
// by itself. A write that goes around the gate is noticed in the next forward, which throws.
//
// Inner's own members (net->head->weight) are whole, and final from unshard() to the next step (or
// reshard()); no rank may write them.

// The part of a unit that does not depend on the type of its module; see Sharded in fully_shard.h.
// Passes may come from several threads; see [Note: passes of several threads] in fsdp.h. Other
// calls come from one at a time.
class TRIREME_API ShardedModule : public torch::nn::Module, public HoldsParts, public HoldsCodes {
 public:
  ~ShardedModule() override;
  ShardedModule(const ShardedModule&) = delete;
  ShardedModule& operator=(const ShardedModule&) = delete;

  // Waits until all ranks have written their shards: the members of the module may be read.
  // Every rank must come, here or to a forward; where parameters are gathered, here.
  void unshard();
  // Starts to gather parameters for a later unshard() or forward. Does nothing where parameters are
  // not gathered.
  void begin_unshard();
  // Frees what unshard() has gathered. Every rank calls it where parameters are gathered.
  void reshard();

  // Set whether this unit and those in it are resharded when forward, and when backward, is over;
  // among all ranks, whatever reshard_among said. Called between forwards, alike on all ranks.
  void set_reshard_after_forward(bool reshard);
  void set_reshard_after_backward(bool reshard);

  // Set the units that are gathered, by plan, while this one computes, in place of the next one
  // (param/prefetch.h); set_dynamic_gather() lets ranks agree about each gather, where some use
  // other units than others. The outermost unit must be in use already, unless this one is the
  // outermost. Called alike on all ranks; without effect where parameters are not gathered.
  void set_forward_prefetch(const std::vector<const ShardedModule*>& units);
  void set_backward_prefetch(const std::vector<const ShardedModule*>& units);
  void set_dynamic_gather(bool dynamic);
  // Sets the sources of memory that is gathered into, and of memory that gradients are sent from,
  // such as memory_of() a process group (comm/group_memory.h); the device's allocator where a
  // source is empty. Called on the outermost unit.
  void set_memory_sources(BufferPool::Source gathered, const BufferPool::Source& gradients);
  // Lets shards be written in place until the next forward or unshard(). Waits until no rank reads;
  // every rank must come.
  void begin_writing() override;

  // Makes backwards, while the guard lives, only accumulate the gradients of this unit and of those
  // in it on this rank; the first backward after it averages what has come together:
  //   { auto guard = model->no_sync(); loss(model->forward(a)).backward(); }
  //   loss(model->forward(b)).backward();
  class TRIREME_API NoSync {
   public:
    explicit NoSync(const ShardedModule& module);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::vector<std::pair<std::shared_ptr<ParamGroup>, bool>> before_;  // each unit's
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }

  // Sets, under shard_among, whether backwards average the gradients of this unit, and of those in
  // it, over replicas. If not, the sums over the sharing ranks wait on this rank, 1/P of the
  // gradients in reduce_dtype, for the next backward that does. Equal on all ranks.
  void set_requires_all_reduce(bool requires_all_reduce);

  // Sets what the gradients of this unit are divided by in place of the number of ranks. Throws
  // ValueError unless it is above 0. Equal on all ranks.
  void set_gradient_divide_factor(double factor);

  // Sets a hook that is called with this unit's part of the averaged gradients before they become
  // .grad, at the end of each backward; an empty one removes it. See [Note: all-reduce hooks]. Set
  // alike on all ranks.
  void set_all_reduce_hook(AllReduceHook hook);

  // Makes backwards only accumulate, and finalize_backward() average what has come together. Called
  // on the outermost unit, alike on all ranks; finalize_backward() is collective.
  void set_manual_backward_finalization(bool enabled);
  void finalize_backward();

  // Calls `train`, whose loop may have another number of inputs on each rank and steps `optimizer`;
  // see sync/join.h. Called on the outermost unit, alike on all ranks:
  //   model->join(optimizer, [&] { for (auto& batch : *loader) step(batch); });
  void join(torch::optim::Optimizer& optimizer, const std::function<void()>& train,
            JoinOptions options = {}) {
    options.optimizers.push_back(&optimizer);
    trireme::join({*this}, train, options);
  }
  // Returns what trireme::join() takes, for optimizers in its options.
  Joinable& joinable();

  // Scales the gradients of this unit and those in it to a common norm of at most `max_norm`;
  // returns the norm before, the same on all ranks. See optim/grad_norm.h. Collective.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0,
                             bool error_if_nonfinite = false);
  // Returns this rank's part of the gradients of this unit and those in it, for
  // trireme::clip_grad_norm_() over several models. Throws ValueError in a join, whose ranks
  // without inputs do not follow that.
  std::vector<GradNormPart> gradients() const;
  // Returns the parameters of this unit, without those of units in it; they live as long as it.
  std::vector<const ShardedParam*> sharded_params() const;
  // Returns this rank's place among the ranks that share the parameters. In the first of these sets
  // of ranks it is the rank among all.
  RankOf sharing() const { return sharers_->rank_of(); }
  void add_parts(HeldParts& parts) const override;
  // Makes a unit that has a compression the outermost one.
  std::vector<KeptCodes> kept_codes() const override;

  // Returns where the time of the last synchronized backward went.
  StepReport last_step() const;
  // Drops, after an exception, what forward and backward have left, accumulated gradients included.
  void reset_iter_state();

  void train(bool on = true) override;
  // Return where nothing is to be done, and else throw NotImplementedError, as clone() always does.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  // Writes what the plain module writes: whole parameters, in their own dtype. Every rank calls it;
  // where ranks share memory they may call unshard() instead while one saves.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Reads what save(), of any number of ranks, or the plain module has written. Every rank calls
  // it. Throws ValueError for parameters that do not fit, which then stay as they were.
  void load(torch::serialize::InputArchive& archive) override;
  void pretty_print(std::ostream& stream) const override;
  bool is_serializable() const override;

 protected:
  // Collective. Throws ValueError for a module that is sharded, shares a parameter with one that
  // is, or has none; on all ranks for modules that differ. Throws NotImplementedError for
  // parameters that cannot be shared.
  ShardedModule(std::shared_ptr<torch::nn::Module> inner, FsdpOptions options);
  // Called before the forward of inner, with `inputs` where gathers() says so.
  void enter(const std::vector<at::Tensor>& inputs);
  // Called after the forward of inner; see Fsdp::post_forward for `outputs` and `all_found`.
  void leave(const std::vector<at::Tensor>& outputs, bool all_found);
  // Called instead of leave() after an exception.
  void abandon(const std::string& reason) noexcept;
  bool gathers() const { return group_ && group_->gathers(); }
  std::optional<at::ScalarType> input_dtype() const;
  std::optional<at::ScalarType> output_dtype() const { return options_.output_dtype; }

 private:
  class Root;
  class Gate;
  class Joining;
  void check_compression() const;
  void collect(std::vector<ShardedParamSpec>& specs);
  std::vector<GradNormPart> parts_of_gradients() const;
  int64_t shard_dim(const std::string& name, const at::Tensor& parameter) const;
  std::optional<at::ScalarType> gradient_dtype(const std::string& name,
                                               const at::Tensor& parameter) const;
  void shard();
  Root& own_root() const;
  std::vector<std::shared_ptr<ParamGroup>> groups_within() const;
  void check_unchanged(std::optional<torch::Device> device,
                       std::optional<torch::Dtype> dtype) const;

  std::shared_ptr<torch::nn::Module> inner_;
  FsdpOptions options_;
  c10::Device device_{c10::kCPU};  // device of all parameters
  std::shared_ptr<Communicator> sharers_;
  std::shared_ptr<Communicator> replicates_with_;  // ranks with the same shards, if any
  std::vector<at::Tensor> leaves_;                 // inner's own parameters
  std::shared_ptr<ParamGroup> group_;              // null if units in it have all parameters
  std::shared_ptr<Gate> gate_;
  std::shared_ptr<UnitHold> hold_;
  mutable std::mutex making_root_;
  mutable std::shared_ptr<Root> root_;  // the outermost unit's, once that was used
};

}  // namespace trireme
