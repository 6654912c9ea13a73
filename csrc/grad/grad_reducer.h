#pragma once

// Gradient path 4/5. In: compressor.h  Out: (comm), flat_optimizer.h

#include <trireme/comm/communicator.h>
#include <trireme/grad/bucket.h>
#include <trireme/grad/bucket_stream.h>
#include <trireme/grad/compressor.h>
#include <trireme/grad/grad_hook.h>
#include <trireme/grad/plan_agreement.h>
#include <trireme/grad/step_report.h>
#include <trireme/grad/used_map.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/memory/buffer_pool.h>
#include <trireme/module/module_parameters.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: when a backward synchronizes]
//
// Nothing is decided in forward but one flag. after_forward() puts a gradient hook on the output
// tensors (no clone); the hook carries whether that forward synchronizes (no_sync() forwards do
// not). When a gradient reaches such an output, the backward that runs is armed: the end callback
// is queued into *its* graph task, which is the outer one even when checkpointing runs reentrant
// backwards inside. From then on each parameter's hook counts down its bucket; buckets are launched
// in plan order; the end callback launches the rest, waits, and delivers every gradient. So .grad
// is final when backward() returns, and 1F1B, several forwards per backward, and several backwards
// per forward need no care.
//
// autograd.grad() and backward(inputs=...) arm only if they accumulate into one of our parameters.
// A graph task that is destroyed before its end callback ran was left by an exception; its peers
// are told (BackwardScope).

// [Note: the order of buckets]
//
// The first synchronized backward launches everything at its end and watches: in which order
// gradients arrive, how often per parameter (a layer checkpointed twice fires twice), which do not.
// Rank 0's order is broadcast while the optimizer and the next forward run, and adopted when the
// next backward is armed, which every rank reaches at the same point of its sequence of
// collectives: no rank ever blocks for it. Afterwards every rank knows from the used-map who used
// what and moves parameters that some rank left unused to trailing buckets.

struct GradReducerOptions {
  BucketCaps caps{{kFirstBucketBytes, kBucketBytes}};
  // Replaces also a .grad that existed before (see bucket.h), which otherwise keeps its identity.
  bool gradient_as_bucket_view = false;
  // The dtype of floating-point gradients on the wire; that of the parameters if absent.
  std::optional<at::ScalarType> reduce_dtype;
  std::string area = "ddp";  // names the strategy in messages
  // Stands in front of each bucket's name. Ranks notice by it that they came to reducers in
  // different orders, even where parameters have the same names.
  std::string bucket_prefix = {};
  // Gives each rank its shards of the average only, and the memory of no others; under kDim0 by
  // reduce_scatter. Parameters must be contiguous, without sparse gradients; neither reduce_dtype
  // nor a communication hook goes with it.
  std::shared_ptr<const ShardPlan> shards = nullptr;
  // Leaves over this rank's shards, one per parameter: the .grad of each gets this rank's part of
  // the average, added to what it has. The .grad of a parameter itself is then what this rank
  // contributes; it is undefined after the reduction. Needs shards.
  std::vector<at::Tensor> sharded_parameters = {};
  // The ranks among which gradients are scattered; all ranks if null. Needs sharded_parameters.
  std::shared_ptr<Communicator> scatters_with = nullptr;
  // The ranks that have the same shards, over which scattered sums are summed up, too. Needs
  // scatters_with.
  std::shared_ptr<Communicator> replicates_with = nullptr;
  // The dtype of each parameter's gradient on the wire; see ParameterInfo. Needs
  // sharded_parameters.
  std::vector<std::optional<at::ScalarType>> reduce_dtypes = {};
  // Makes every backward that accumulates into a parameter synchronize, unless
  // set_synchronize(false) was called: for callers who see no forward.
  bool arms_at_parameters = false;
  // Leaves the sums of gradients that go as a stream to visit_sums(): after backward every .grad is
  // undefined. Costs a ring that holds all gradients. Needs shards.
  bool defers_sums = false;
  // Says that parameters have the same values on all ranks. Ranks compare samples of parameters
  // whose `.data` was given other memory, at the end of the backward that follows, and warn, once,
  // if these differ.
  bool compares_moved_values = false;
};

TRIREME_API std::vector<ParameterInfo> describe_parameters(const NamedParameters& parameters);

// Averages gradients over the ranks while backward computes them.
//
// Cost per synchronized backward: one all-reduce (reduce_scatter) per bucket (all gradient bytes
// once, 4 bytes per parameter for the used-map), buffers of one gradient size in all, which become
// the .grad of their parameters.
//
// Thread-safe towards autograd's threads. The public functions are called by the thread that
// trains, without the GIL.
class TRIREME_API GradReducer final : public GradSink,
                                      public std::enable_shared_from_this<GradReducer> {
 public:
  static std::shared_ptr<GradReducer> make(NamedParameters parameters,
                                           std::shared_ptr<Communicator> communicator,
                                           GradReducerOptions options);
  ~GradReducer() override;

  // These two are called around every forward with gradients enabled. Further outputs may hide in
  // objects that the caller could not look into if `all_found` is false.
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs, bool synchronize,
                     bool all_found = true);

  // Makes the reducer notice parameters that are replaced, added or removed. Called at most once,
  // before the first forward.
  void watch_module(ModuleWatch watch);

  // Makes the next backward that reaches an output or a parameter synchronize, whatever its forward
  // said.
  void prepare_for_backward();

  // The callback is called when a backward is found to synchronize, before its first collective, on
  // the thread that runs it.
  void set_armed_callback(std::function<void()> callback);
  // Says whether backwards that are armed at parameters synchronize.
  void set_synchronize(bool synchronize);
  // Arms these reducers together, in this order, whichever of them a backward reaches first. Ranks
  // may get gradients in different orders, or none (join), and still wait for each other in one
  // order: the first reducer's collectives go out while backward runs, those of the others, where
  // gradients do not stream, when it ends. Keeps none of them alive.
  static void arm_together(const std::vector<std::shared_ptr<GradReducer>>& reducers);
  // Excludes parameters from averaging: their gradients keep accumulating locally. One flag per
  // parameter, equal on all ranks. Needs sharded_parameters.
  void hold(const std::vector<bool>& held);
  // Holds sums back: they are neither summed up over replicates_with nor delivered to a .grad, but
  // wait on this rank, in the dtype of the reduction, for the first backward that does so. One flag
  // per parameter, equal on all ranks. Does nothing without replicates_with.
  void defer_all_reduce(const std::vector<bool>& deferred);
  // Says which parameters get no gradient on this rank in the next synchronized backward, so that
  // others in their buckets do not wait for its end. One flag per parameter. Called by the callback
  // of set_armed_callback(). A gradient that comes all the same is in time until its bucket is
  // launched. Needs sharded_parameters.
  void expect_none(std::vector<bool> unused);
  // Finds parameters that were unfrozen, whose gradients would else go by unseen.
  void notice_changes();

  // Replaces the all-reduce by `hook`. Throws c10::Error on a second call, and while a backward
  // runs.
  void set_comm_hook(std::shared_ptr<CommHook> hook);
  // Sets what sums are divided by: the number of ranks, unless a join counts only those still
  // active.
  void set_divisor(double divisor);

  // Says where buffers come from; see BufferPool::set_source(). Needs sharded_parameters.
  void set_memory_source(BufferPool::Source source) { pool_->set_source(std::move(source)); }

  // Sets what each parameter's sum is divided by in place of the divisor; 0 means the divisor.
  // Needs sharded_parameters.
  void set_divide_factors(std::vector<double> factors);

  // Makes backward() return after the last launch: the caller then calls finalize_backward()
  // exactly once per synchronized backward.
  void set_manual_finalization(bool manual);
  void finalize_backward();
  // Reduces the gradients that backwards without synchronization have accumulated. Collective.
  // Needs sharded_parameters.
  void reduce_accumulated();
  // Forgets the gradients that this rank has accumulated, and sums that wait. Needs
  // sharded_parameters.
  void drop_accumulated();
  // Says whether finalize_backward() may only be called after backward returned.
  bool should_finalize_after_backward() const;

  // Takes part in one synchronized backward of the others with zeros (join), leaving every .grad
  // alone unless `deliver` says that this rank steps with them.
  void shadow_backward(bool deliver = false);

  // The callback is called with the indices of parameters whose .grad has just become final, on the
  // thread that runs backward, which may still be at work on others (optimizer in backward).
  using DeliveredCallback = std::function<void(const std::vector<int64_t>& parameters)>;
  void set_delivered_callback(DeliveredCallback callback);

  // The part of a sum that this rank owns.
  struct OwnSum {
    int64_t parameter = 0;
    at::Tensor values;    // in one row, in the dtype of the reduction; may be written to
    int64_t longest = 0;  // elements that any of the ranks has
  };
  // Shows `callback` the sums of `chosen` parameters before they become .grad: divided, in an order
  // equal on all ranks, as zeros where no rank used the parameter. It is called when backward is
  // over and nothing of this reducer is on its way any more: once per synchronized backward, and
  // once per bucket of gradients that its plan did not hold. `chosen` has one flag per parameter.
  // Needs sharded_parameters.
  using SummedCallback = std::function<void(const std::vector<OwnSum>& sums)>;
  void set_summed_callback(std::vector<bool> chosen, SummedCallback callback);

  // Returns the indices of gradients that are not as the reducer left them: changed in place,
  // replaced, or accumulated without synchronizing, since or before a further backward was added to
  // them. Neither `allowed` in-place writes to each nor zeros count as a change. Needs shards.
  std::vector<int64_t> changed_gradients(uint32_t allowed = 0) const;
  // Says whether the last backward has left sums to be made; summed() says of which parameters:
  // those that some rank used.
  bool has_sums() const { return has_sums_; }
  const std::vector<bool>& summed() const { return summed_; }
  // Makes these sums, once; `visit` sees those of summed() parameters. May wait for other ranks.
  void visit_sums(const std::function<void(const BucketStream::Sums&)>& visit);
  // Makes these sums as .grad, as if they had not been deferred. Does nothing if there are none.
  void settle_sums();
  // Makes what others own of each .grad zeros again, if anybody wrote to it.
  void keep_own_gradients();
  // Forgets what was reduced but is not in .grad, because its sum was deferred, or a backward
  // accumulated on it without synchronizing. Needs shards.
  void drop_set_aside();

  // Tells `text` to all ranks that may wait for this one in a collective of this reducer. An
  // exception in backward is told without this call.
  void announce_failure(const std::string& text) noexcept;

  // Returns what the last completed backward took.
  StepReport last_step() const;
  // Returns one line per bucket of the current plan.
  std::string describe_plan() const;
  const BucketPlan& plan() const { return plan_; }
  const std::vector<ParameterInfo>& parameter_infos() const { return infos_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  Communicator& communicator() { return *communicator_; }

  void gradient_ready(int64_t index, bool has_gradient) override;
  void gradient_due(int64_t index) override;

 private:
  friend class BackwardScope;
  enum class Phase : uint8_t { kIdle, kRunning, kAwaitingFinalize };
  struct Place {
    int32_t bucket = -1;  // -1: not planned
    int32_t slot = -1;
  };

  GradReducer(NamedParameters parameters, std::shared_ptr<Communicator> communicator,
              GradReducerOptions options);

  // arming (backward_scope.cpp)
  void output_gradient_arrived(bool synchronize);
  void arm();
  void finish_backward();
  void abandon_backward() noexcept;

  // one step (grad_reducer.cpp)
  void look_around();
  void begin_backward(bool shadow);
  void mark_seen_late(size_t index);
  void launch_ready();
  void launch(size_t bucket);
  Pending reduce(size_t bucket);
  void launch_rest();
  void begin_stream();
  void catch_up();
  void launch_map();
  void deliver_done();
  void settle(size_t bucket);
  void deliver_settled();
  void deliver_arrived(size_t bucket);
  void drop_pending();
  void deliver_used(Bucket& bucket, bool chosen);
  void deliver(Bucket& bucket, size_t slot);
  void restore(Bucket& bucket, size_t slot);
  void arm_with_siblings();
  bool leads_siblings() const;
  bool scatter_waits() const;
  void set_aside(size_t index);
  void put_back();
  bool has_owners() const { return !options_.sharded_parameters.empty(); }
  void widen_accumulated(size_t index);
  void watch_accumulated(size_t index);
  const Communicator& sharers() const {
    return options_.scatters_with ? *options_.scatters_with : *communicator_;
  }
  // Under the other placements some ranks own all of a gradient, and runs would be mostly padding.
  bool may_scatter() const {
    return options_.shards && options_.shards->placement == ShardPlacement::kDim0;
  }
  OwnShards own_shards(bool scatters) const {
    return {options_.shards, sharers().rank(), scatters, pool_};
  }
  void keep_few_in_flight();
  bool is_expected(size_t index) const { return unused_.empty() || !unused_[index]; }
  void check_gradient(int64_t index, bool has_gradient);
  void check_kind(const at::Tensor& parameter, const std::string& name, bool has_gradient);
  [[noreturn]] void refuse_gradient(const std::string& name, const char* got,
                                    const char* next_step);
  void collect(bool may_learn = true);
  void settle_map(bool late = false);
  void collect_by_itself(bool may_learn);
  double scale() const;
  const std::string& name_of(int64_t index) const {
    return infos_[static_cast<size_t>(index)].name;
  }

  // sums before they become .grad (grad_reducer_sums.cpp)
  Pending sum_over_replicas(Bucket& bucket, const std::string& label);
  bool is_deferred(size_t index) const { return !deferred_.empty() && deferred_[index]; }
  bool is_chosen(size_t index) const { return summed_callback_ != nullptr && chosen_[index]; }
  double last_scale(size_t index) const;
  void add_own_sums(Bucket& bucket, std::vector<OwnSum>& sums) const;
  void show_sums();
  void begin_use_anew();

  // changes (grad_reducer_changes.cpp)
  void watch_parameters();
  bool is_reshaped(size_t index) const {
    return parameters_[index].sizes() != at::IntArrayRef(infos_[index].sizes);
  }
  static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  }
  bool is_moved(size_t index) const {
    return !storages_.empty() && storages_[index] != storage_of(parameters_[index]);
  }
  void look_at_module();
  void look_again(bool shadow);
  void newcomer_ready(size_t newcomer, bool has_gradient);
  void leave_out_changed();
  void settle_change(bool late);
  void compare_moved_values(const std::vector<bool>& moved);
  void replan(bool late);
  void check_replannable(const ParameterChange& change) const;
  void reduce_left_out(const std::vector<int64_t>& left_out, const std::vector<bool>& used);
  void spread_values(const std::vector<int64_t>& parameters);

  // plans (grad_reducer_plan.cpp)
  void set_parameters(const NamedParameters& parameters);
  void adopt_pending_order();
  void build_buckets();
  void learn_order();
  void update_trailing();
  BucketPlan make_plan(std::vector<int64_t> order) const;
  std::vector<Place> places_in(const BucketPlan& plan) const;

  std::vector<at::Tensor> parameters_;
  std::vector<ParameterInfo> infos_;
  std::shared_ptr<Communicator> communicator_;
  GradReducerOptions options_;
  std::unique_ptr<Compressor> compressor_;
  // Replaces the compressor from the second synchronized backward on, where ranks can have a
  // stream.
  std::unique_ptr<BucketStream> stream_;
  bool asked_for_stream_ = false;
  std::vector<GradHook> hooks_;
  double divisor_ = 1;
  std::vector<double> divide_factors_;

  // the module that changes
  ModuleWatch watch_;
  std::optional<ModuleNow> present_;  // set where it is not as planned
  struct Newcomer {                   // a parameter that is not planned yet
    at::Tensor tensor;
    GradHook hook;
    bool used = false;  // since the last synchronization
  };
  std::vector<Newcomer> newcomers_;  // their hooks count on from parameters_
  int64_t replanned_at_ = -1;        // the step
  // Tells for each parameter where its values were when ranks had the same; empty if nobody asks.
  std::vector<const c10::StorageImpl*> storages_;

  // the plan and its memory
  std::vector<int64_t> order_;  // parameters in the order in which gradients are expected
  std::vector<bool> trailing_;
  std::vector<int64_t>
      partly_used_at_;  // the last step in which some rank left the parameter unused
  BucketPlan plan_;
  std::vector<Place> places_;
  std::shared_ptr<BufferPool> pool_;
  std::vector<Bucket> buckets_;
  // values per parameter, used with shards; see [Note: who owns a gradient's memory] in bucket.h
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  struct Watched {
    std::optional<WeakTensor> grad;
    uint32_t version = 0;

    static Watched of(const at::Tensor& tensor);
    bool is(const at::Tensor& tensor) const;
    bool is_unchanged(const at::Tensor& tensor, uint32_t allowed = 0) const;
  };
  std::vector<Watched> delivered_as_;
  std::vector<Watched> accumulated_as_;  // in place of what was set aside
  std::vector<at::Tensor> set_aside_;
  std::vector<bool> held_;
  std::vector<bool> unused_;              // see expect_none(); empty: none
  std::vector<bool> deferred_;            // see defer_all_reduce(); empty: none
  std::vector<at::Tensor> partial_sums_;  // what defer_all_reduce() holds back, by parameter
  std::vector<bool> chosen_;
  SummedCallback summed_callback_;
  std::vector<bool> was_changed_;  // what was set aside, or is in .grad since a backward was lost
  bool defers_ = false;            // this step
  bool has_sums_ = false;          // the last backward has left some
  std::vector<bool> summed_;
  std::vector<std::string> labels_;
  bool tail_in_last_bucket_ = false;
  bool scatters_ = false;  // buckets_ are reduce_scattered
  bool plan_is_stale_ = true;
  bool hook_froze_order_ = false;  // a communication hook may keep state by bucket index
  bool observing_ = true;          // this backward teaches the order
  Pending order_pending_;
  at::Tensor pending_order_;

  // the step that runs
  // Recursive: a communication hook, called with it held, may ask for last_step().
  mutable std::recursive_mutex mutex_;
  Phase phase_ = Phase::kIdle;
  bool shadow_ = false;
  bool force_synchronize_ = false;
  bool arm_at_parameter_ = false;
  bool synchronize_ = true;  // see set_synchronize()
  bool manual_finalization_ = false;
  bool streams_ = false;  // this step
  bool waits_in_vain_ = false;
  int64_t step_ = 0;
  std::vector<int32_t> fires_expected_;  // per backward, as seen in the last one
  std::vector<int32_t> fires_seen_;
  std::vector<bool> is_delivered_;  // its .grad is final
  std::vector<int64_t> arrivals_;
  std::vector<int64_t> waiting_slots_;  // per bucket: parameters whose gradient is still to come
  size_t next_launch_ = 0;
  size_t next_settle_ = 0;
  size_t next_deliver_ = 0;
  std::vector<Pending> pending_;
  std::vector<Pending> replicas_pending_;  // see sum_over_replicas()
  UsedMap used_{0};
  at::Tensor map_wire_;
  Pending map_pending_;
  bool map_is_unread_ = false;
  int64_t last_arrived_ = -1;
  std::string own_error_;
  DeliveredCallback delivered_;
  std::function<void()> armed_;
  std::vector<std::weak_ptr<GradReducer>> siblings_;  // see arm_together(); with this one
  bool shadow_delivers_ = false;
  StepClock clock_;
};

}  // namespace trireme
