#pragma once

// Leads along the gradient path: hook, bucket, transport, delivery.

#include <trireme/comm/communicator.h>
#include <trireme/grad/backward_trigger.h>
#include <trireme/grad/bucket_layout.h>
#include <trireme/grad/grad_delivery.h>
#include <trireme/grad/grad_hook.h>
#include <trireme/grad/gradient_checks.h>
#include <trireme/grad/launch_queue.h>
#include <trireme/grad/parameter_changes.h>
#include <trireme/grad/step_report.h>
#include <trireme/grad/transport.h>
#include <trireme/grad/transport_switch.h>
#include <trireme/module/module_parameters.h>

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

class CommHook;

// [Note: transport and delivery]
//
// A gradient's path has two parts. Its *transport* (transport.h) is how it leaves this rank and
// comes back as a sum: one collective per bucket, one stream of deposits, a communication hook. Its
// *delivery* (grad_delivery.h) is where the sum ends: whole in .grad (DDP), as a shard of .grad
// (ZeRO 2), in the .grad of a shard's owner (fully_shard). Strategies differ by these two, and by
// when a backward synchronizes (backward_trigger.h). The reducer knows neither: it takes each
// gradient from its hook to its place in the layout, each bucket to the transport when it is full,
// and each sum to the delivery.

struct GradReducerOptions {
  BucketCaps caps{{kFirstBucketBytes, kBucketBytes}};
  // The dtype of floating-point gradients on the wire; that of the parameters if absent. By
  // parameter, if the list is not empty.
  std::optional<at::ScalarType> reduce_dtype;
  std::vector<std::optional<at::ScalarType>> reduce_dtypes = {};
  std::string area = "ddp";        // names the strategy in messages
  std::string bucket_prefix = {};  // see BucketLayout::Options
  // Whether parameters have the same values on all ranks. Ranks then compare samples of parameters
  // whose `.data` was given other memory, at the end of the backward that follows, and warn, once,
  // if these differ.
  bool compares_moved_values = false;
  // Called with the text of a c10::DistBackendError that is about to leave a backward or a function
  // of the reducer; may throw another exception in its place.
  std::function<void(const std::string&)> failed = {};
};

// A comparison of one number between ranks that reduce, at no cost.
struct GatherHashCheck {
  std::function<int64_t()> number;  // at least 0; asked for when the used-map is sent
  int64_t share = 0;                // see UsedMap::compare()
  std::function<void()> refuse;     // called on all ranks if numbers differ, and throws
  int64_t world = 0;                // how many ranks compare
};

// The parts from which a strategy makes a reducer.
struct GradReducerParts {
  std::shared_ptr<Communicator> communicator;  // all ranks that take part in a step
  std::shared_ptr<BackwardTrigger> trigger;
  std::shared_ptr<GradDelivery> delivery;
  std::unique_ptr<Transport> transport =
      nullptr;  // a CollectiveTransport over the communicator if null
};

// Averages gradients over the ranks while backward computes them.
//
// Cost per synchronized backward: one all-reduce (reduce_scatter) per bucket (all gradient bytes
// once, 4 bytes per parameter for the used-map), buffers of one gradient size in all, which become
// the .grad of their parameters.
//
// Thread-safe towards autograd's threads. The public functions are called by the thread that
// trains, without the GIL.
class TRIREME_API GradReducer final : public GradSink, public BackwardSteps {
 public:
  static std::shared_ptr<GradReducer> make(const NamedParameters& parameters,
                                           GradReducerParts parts,
                                           const GradReducerOptions& options);

  // Makes the reducer notice parameters that are replaced, added or removed. Called at most once,
  // before the first forward.
  void watch_module(ModuleWatch watch) {
    const auto lock = trigger_->lock();
    changes_.watch_module(std::move(watch));
  }
  // Finds parameters that were unfrozen, whose gradients would else go unnoticed.
  void notice_changes() {
    const auto lock = trigger_->lock();
    if (trigger_->is_idle()) changes_.watch_parameters();
  }
  // Sets which parameters get no gradient on this rank in the next synchronized backward, so that
  // others in their buckets do not wait for its end. One flag per parameter. Called by the armed
  // callback. A gradient that comes all the same is in time until its bucket is launched.
  void expect_none(std::vector<bool> unused) {
    const auto lock = trigger_->lock();
    unused_ = std::move(unused);
  }

  // Makes ranks compare numbers in each synchronized backward; does nothing unless these are all
  // the ranks that reduce.
  void compare_numbers(GatherHashCheck comparison) {
    if (comparison.world == communicator_->world()) comparison_ = std::move(comparison);
  }

  // Puts `hook` in the place of the transport. Throws c10::Error on a second call, and while a
  // backward runs.
  void set_comm_hook(std::shared_ptr<CommHook> hook);
  // Sets the divisor of sums: the number of ranks, unless a join counts only those still active.
  void set_divisor(double divisor) {
    divisor_ = divisor;
    delivery_->set_divisor(divisor);
  }
  // Sets where buffers of reduce_scatters come from; see BufferPool::set_source(). Needs shards.
  void set_memory_source(BufferPool::Source source) {
    layout_.pool()->set_source(std::move(source));
  }

  // Makes backward() return after the last launch: the caller then calls finalize_backward()
  // exactly once per synchronized backward. Throws c10::Error while a backward runs.
  void set_manual_finalization(bool manual);
  void finalize_backward();
  // Reduces the gradients that backwards without synchronization have accumulated. Collective.
  void reduce_accumulated() override { collect_by_itself(Part::kGradients, /*may_learn=*/false); }
  // Does what a synchronized backward does on other ranks, without one here, with the gradients
  // that have come since the last synchronization, or with `all` that are in .grad. Collective.
  void reduce_without_backward(bool all);
  // Takes part in one synchronized backward of the others with zeros (join), leaving every .grad
  // alone unless `deliver` says that this rank steps with them.
  void shadow_backward(bool deliver = false) {
    collect_by_itself(deliver ? Part::kZerosThenStep : Part::kZeros, /*may_learn=*/true);
  }

  // Called with the indices of parameters whose .grad has just become final, on the thread that
  // runs backward, which may still be at work on others (optimizer in backward).
  using DeliveredCallback = std::function<void(const std::vector<int64_t>& parameters)>;
  void set_delivered_callback(DeliveredCallback callback) {
    const auto lock = trigger_->lock();
    queue_.set_delivered_callback(std::move(callback));
  }

  // Tells `text` to all ranks that may wait for this one in a collective of this reducer. An
  // exception in backward is told without this call.
  void announce_failure(const std::string& text) noexcept override {
    transports_.own().announce_failure(text);
  }

  // Returns whether there are parameters to train, of which none got a gradient since the last
  // synchronization.
  bool lacks_gradients() const;

  // Returns the times of the last completed backward.
  StepReport last_step() const {
    const auto lock = trigger_->lock();
    return clock_.last();
  }
  const BucketLayout& layout() const { return layout_; }

 private:
  GradReducer(const NamedParameters& parameters, GradReducerParts parts,
              const GradReducerOptions& options);
  void begin_with(const NamedParameters& parameters);
  void build_layout();
  double scale() const { return transports_.own().traits().divides ? 1.0 : 1.0 / divisor_; }
  bool is_shadow() const { return part_ != Part::kGradients; }
  bool is_expected(size_t index) const { return unused_.empty() || !unused_[index]; }

  // called by hooks and the trigger
  void gradient_ready(int64_t index, bool has_gradient) override;
  void gradient_due(int64_t index) override;
  void forward_begins() override;
  void forward_ends() override;
  bool owns(const at::Tensor& leaf) const override { return layout_.has(leaf); }
  bool is_visited_by(const VisitedNodes& visited) const override {
    return changes_.is_visited_by(visited);
  }
  void look_around() override;
  void begin_backward(Part part) override;
  void finish_backward() override;
  void abandon_backward(const std::string& why) noexcept override;

  // Calls `step`. What the group fails with leaves it as GradReducerOptions::failed says.
  template <typename Step>
  void or_failed(const Step& step) {
    try {
      step();
    } catch (const c10::DistBackendError& error) {
      if (failed_) failed_(error.what_without_backtrace());
      throw;
    }
  }
  void take_gradient(int64_t index, bool has_gradient);
  void check(const at::Tensor& parameter, const std::string& name) {
    checks_.check(parameter, name);
    if (makes_graph_) checks_.check_graph(parameter, delivery_->traits().keeps_graphs);
  }
  void newcomer_ready(size_t newcomer, bool has_gradient);
  void slot_ready(size_t parameter, BucketPlace place, bool is_last);
  void begin_step();
  void begin_transport();
  void catch_up();
  // Returns whether this backward will find the buckets that a communication hook keeps seeing.
  bool finds_buckets() const { return transports_.own().traits().keeps_buckets && !keeps_buckets_; }
  void keep_buckets() {
    keeps_buckets_ = true;
    layout_.keep_buckets();
  }
  void find_buckets();
  void launch_rest();
  void collect(bool may_learn = true);
  void collect_by_itself(Part part, bool may_learn);
  void send_map();
  bool needs_map() const;
  void read_map(bool late = false);
  void agree_on_changes(bool late);
  void learn_order();

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<BackwardTrigger> trigger_;
  std::shared_ptr<GradDelivery> delivery_;
  TransportSwitch transports_;
  GradientChecks checks_;
  BucketLayout layout_;
  ParameterChanges changes_;
  LaunchQueue queue_;
  std::function<void(const std::string&)> failed_;
  double divisor_ = 1;
  std::vector<bool> unused_;  // see expect_none(); empty: none
  bool keeps_buckets_ = false;
  GatherHashCheck comparison_;

  // the step that runs
  int64_t step_ = 0;
  bool makes_graph_ = false;  // backward(create_graph=True)
  Part part_ = Part::kGradients;
  Pending map_pending_;
  bool map_is_unread_ = false;
  StepClock clock_;
};

}  // namespace trireme
