#include <trireme/grad/grad_reducer.h>

#include <trireme/comm/c10d/comm_hook.h>
#include <trireme/common/trace.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {

using Clock = StepClock::Clock;

namespace {

constexpr size_t kMostInFlight = 2;
constexpr std::chrono::seconds kPatience{1};

}  // namespace

void GradReducer::before_forward() {
  const std::lock_guard lock(mutex_);
  look_around();
  clock_.forward_begins();
}

// Looks at what may have changed since the last step: the group, the user's parameters.
void GradReducer::look_around() {
  communicator_->recover();
  if (const auto failure = communicator_->failure()) {
    const bool at_parameters = options_.arms_at_parameters;
    C10_THROW_ERROR(
        DistBackendError,
        error_text(options_.area,
                   (at_parameters ? "got a backward" : "got a forward") +
                       (" after the group had failed: " + *failure),
                   communicator_->rank_of(),
                   std::string("Destroy the process group, initialise it again and ") +
                       (at_parameters ? "make the optimizer anew." : "wrap the module anew.")));
  }
  TORCH_CHECK(phase_ != Phase::kAwaitingFinalize,
              error_text(options_.area,
                         "got a forward before finalize_backward(), expected one call of it "
                         "after every synchronized backward",
                         communicator_->rank_of(),
                         "Call finalize_backward(), or turn manual finalization off."));
  if (phase_ == Phase::kIdle) watch_parameters();
}

double GradReducer::scale() const { return compressor_->is_plain_sum() ? 1.0 / divisor_ : 1.0; }

// Called when the backward is armed: on every rank at the same place in its sequence of
// collectives.
void GradReducer::begin_backward(bool shadow) {
  TORCH_CHECK(phase_ == Phase::kIdle,
              error_text(options_.area, "got a second backward before finalize_backward()",
                         communicator_->rank_of(),
                         "Call finalize_backward() once per synchronized backward."));
  if (map_is_unread_) settle_map(/*late=*/true);
  adopt_pending_order();
  look_again(shadow);
  settle_sums();
  for (size_t i = 0; options_.shards && !has_owners() && i < parameters_.size(); ++i) set_aside(i);
  if (plan_is_stale_) build_buckets();
  ++step_;
  shadow_ = shadow;
  force_synchronize_ = arm_at_parameter_ = false;
  next_launch_ = next_settle_ = next_deliver_ = 0;
  drop_pending();
  pending_.resize(buckets_.size());
  replicas_pending_.resize(buckets_.size());
  arrivals_.clear();
  last_arrived_ = -1;
  own_error_.clear();
  std::fill(fires_seen_.begin(), fires_seen_.end(), 0);
  is_delivered_.assign(parameters_.size(), false);
  for (Bucket& bucket : buckets_) bucket.begin_step(shadow);
  leave_out_changed();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    waiting_slots_[i] = 0;
    for (const BucketSlot& slot : plan_.buckets[i].slots) {
      const auto at = static_cast<size_t>(slot.parameter);
      if (infos_[at].requires_grad && places_[at].bucket >= 0 && is_expected(at))
        ++waiting_slots_[i];
    }
  }
  begin_stream();
  clock_.backward_begins(step_, streams_);
  phase_ = Phase::kRunning;
}

void GradReducer::begin_stream() {
  streams_ = stream_ && BucketStream::takes(plan_);
  const bool defers =
      options_.defers_sums && std::none_of(set_aside_.begin(), set_aside_.end(),
                                           [](const at::Tensor& grad) { return grad.defined(); });
  waits_in_vain_ = false;
  if (streams_) stream_->begin_step({buckets_, labels_, scale(), defers});
  defers_ = streams_ && stream_->defers();
  summed_.assign(parameters_.size(), false);
}

void GradReducer::gradient_ready(int64_t index, bool has_gradient) {
  const std::lock_guard lock(mutex_);
  if (index >= static_cast<int64_t>(parameters_.size()))
    return newcomer_ready(static_cast<size_t>(index) - parameters_.size(), has_gradient);
  if (has_gradient) used_.mark_used(index);
  if (phase_ != Phase::kRunning) {
    if (has_owners()) {
      widen_accumulated(static_cast<size_t>(index));
    } else if (options_.shards) {
      watch_accumulated(static_cast<size_t>(index));
    }
    if (!arm_at_parameter_ && !force_synchronize_) return;
    arm();
    if (phase_ != Phase::kRunning) return;
  }
  const auto at = static_cast<size_t>(index);
  const Place place = places_[at];
  last_arrived_ = index;
  const int32_t fires = ++fires_seen_[at];
  if (observing_) arrivals_.push_back(index);
  check_gradient(index, has_gradient);
  if (has_owners() && held_[at]) return widen_accumulated(at);
  if (place.bucket < 0) return;  // unfrozen or cast since the plan was made; see settle_change()
  const auto bucket = static_cast<size_t>(place.bucket);
  const auto slot = static_cast<size_t>(place.slot);
  if (has_gradient) {
    streams_ ? buckets_[bucket].note_arrived(slot)
             : buckets_[bucket].gradient_arrived(slot, scale());
  }
  if (!is_expected(at)) {
    unused_[at] = false;
    ++waiting_slots_[bucket];
  }
  if (fires != fires_expected_[at]) return;
  --waiting_slots_[bucket];
  if (observing_) return;
  if (streams_) {
    stream_->gradient_ready(bucket, slot);
    stream_->advance();
    if (stream_->is_behind() && leads_siblings()) catch_up();
  }
  if (streams_ || (leads_siblings() && !scatter_waits())) launch_ready();
}

void GradReducer::catch_up() {
  const auto begin = Clock::now();
  stream_->catch_up();
  clock_.waited(Clock::now() - begin);
}

// Refuses what this backward cannot average. Raised here, it comes out of the user's backward().
void GradReducer::check_gradient(int64_t index, bool has_gradient) {
  const auto at = static_cast<size_t>(index);
  check_kind(parameters_[at], '\'' + name_of(index) + '\'', has_gradient);
  const Place place = places_[at];
  const auto bucket = static_cast<size_t>(place.bucket);
  const bool is_under_way =
      place.bucket >= 0 &&
      (bucket < next_launch_ ||
       (streams_ && stream_->has_taken(bucket, static_cast<size_t>(place.slot))));
  if (is_under_way) {
    refuse_gradient(
        '\'' + name_of(index) + '\'',
        "with a further gradient in the same backward after its bucket was launched, expected as "
        "many as in the backward before",
        "Checkpoint this layer with use_reentrant=False, or the same number of times in every "
        "step.");
  }
}

void GradReducer::check_kind(const at::Tensor& parameter, const std::string& name,
                             bool has_gradient) {
  if (at::GradMode::is_enabled()) {
    refuse_gradient(
        name,
        "in backward(create_graph=True), expected a first-order backward: the average over ranks "
        "has no derivative",
        "Use torch.autograd.grad(..., create_graph=True) inside the loss instead.");
  }
  if (has_gradient && !parameter.grad().defined()) {
    refuse_gradient(
        name,
        "without its gradient, expected it in .grad: a post-accumulate-grad hook took it before "
        "it was averaged",
        "Register the optimizer with _apply_optimizer_in_backward before the first forward, or "
        "step after backward.");
  }
}

void GradReducer::refuse_gradient(const std::string& name, const char* got, const char* next_step) {
  own_error_ =
      error_text(options_.area, "got " + name + ' ' + got, communicator_->rank_of(), next_step);
  C10_THROW_ERROR(NotImplementedError, own_error_);
}

void GradReducer::launch_ready() {
  bool launched = false;
  while (next_launch_ < buckets_.size() && waiting_slots_[next_launch_] <= 0) {
    launch(next_launch_);
    launched = true;
  }
  if (launched) deliver_done();
}

void GradReducer::launch(size_t index) {
  TRIREME_TRACE("grad_reducer.launch");
  pending_[index] = streams_ ? stream_->pending(index) : reduce(index);
  clock_.bucket_launched(buckets_[index].plan().bytes());
  ++next_launch_;
  if (scatters_ && !streams_ && !manual_finalization_) keep_few_in_flight();
}

// Each bucket that is reduce_scattered has a buffer as long as it is on its way. But a rank that
// has left a parameter out launches its bucket when its backward is over, and until then may need
// others for something else, such as a gather: who waits for it in vain goes on.
void GradReducer::keep_few_in_flight() {
  const auto begin = Clock::now();
  while (next_launch_ - next_settle_ > kMostInFlight && !waits_in_vain_) {
    const bool is_on_cpu = buckets_[next_settle_].plan().device.is_cpu();
    waits_in_vain_ = is_on_cpu && !pending_[next_settle_].comes_within(kPatience);
    if (!waits_in_vain_) settle(next_settle_);
  }
  deliver_settled();
  clock_.waited(Clock::now() - begin);
}

Pending GradReducer::reduce(size_t index) {
  Bucket& bucket = buckets_[index];
  // A hook may chain collectives in callbacks, which the engine's threads run: one hook at a time,
  // so that all ranks issue them in one order.
  if (!compressor_->is_plain_sum() && index > 0 && bucket.plan().device.is_cpu())
    pending_[index - 1].wait();
  bucket.complete(scale());
  const bool is_last = index + 1 == buckets_.size();
  if (is_last && tail_in_last_bucket_) used_.write_to(bucket.tail(), shadow_);
  return compressor_->reduce({bucket, parameters_, index, buckets_.size(), labels_[index]});
}

void GradReducer::launch_rest() {
  while (next_launch_ < buckets_.size()) launch(next_launch_);
  if (streams_) {
    at::Tensor tail;
    if (tail_in_last_bucket_)
      used_.write_to(tail = at::empty_like(buckets_.back().tail()), shadow_);
    stream_->close(tail);
    stream_->advance();
  }
  if (!tail_in_last_bucket_ && compressor_->is_plain_sum()) launch_map();
}

void GradReducer::launch_map() {
  if (!map_wire_.defined()) {
    map_wire_ = at::empty({used_.numel()},
                          at::TensorOptions().dtype(at::kFloat).device(infos_.front().device));
  }
  used_.write_to(map_wire_, shadow_);
  map_pending_ = communicator_->all_reduce({map_wire_}, ReduceOp::kSum, "used-map");
}

// Delivers gradients of finished buckets to their .grad while backward is still at work.
void GradReducer::deliver_done() {
  if (manual_finalization_ || !buckets_.front().plan().device.is_cpu()) return;
  while (next_settle_ < next_launch_ && pending_[next_settle_].done()) settle(next_settle_);
  deliver_settled();
}

void GradReducer::deliver_arrived(size_t index) {
  if (index == next_settle_) settle(index);
  replicas_pending_[index].wait();
  ++next_deliver_;
  deliver_used(buckets_[index], /*chosen=*/false);
}

void GradReducer::drop_pending() {
  pending_.clear();
  replicas_pending_.clear();
}

// Delivers what this rank used to its .grad: of the parameters that wait for the summed callback,
// or of the others. Whether anybody used what this rank did not, only the map can say.
void GradReducer::deliver_used(Bucket& bucket, bool chosen) {
  const std::vector<BucketSlot>& slots = bucket.plan().slots;
  std::vector<int64_t> delivered;
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const auto at = static_cast<size_t>(slots[slot].parameter);
    if (places_[at].bucket < 0) continue;
    if (is_deferred(at)) {
      is_delivered_[at] = true;  // it is where it belongs
      continue;
    }
    if (is_chosen(at) != chosen || !used_.used_here(slots[slot].parameter)) continue;
    is_delivered_[at] = true;
    deliver(bucket, slot);
    if (delivered_) delivered.push_back(slots[slot].parameter);
  }
  if (!delivered.empty()) delivered_(delivered);
}

// Waits for everything that is in flight and brings every .grad to its final value.
void GradReducer::collect(bool may_learn) {
  phase_ = Phase::kIdle;  // also if a wait throws
  const auto begin = Clock::now();
  while (next_deliver_ < buckets_.size()) deliver_arrived(next_deliver_);
  if (!compressor_->is_plain_sum()) launch_map();  // not before: see launch()
  map_pending_.wait();
  map_pending_ = {};
  clock_.waited(Clock::now() - begin);
  show_sums();

  map_is_unread_ = true;
  used_.start_reading(tail_in_last_bucket_ ? buckets_.back().tail() : map_wire_);
  bool needs_map = infos_.front().device.is_cpu() || used_.changed_here() || observing_;
  for (size_t i = 0; i < places_.size() && !needs_map; ++i) {
    needs_map = places_[i].bucket >= 0 && !is_delivered_[i];
  }
  // On devices reading the map waits for this backward. Where this rank used everything and changed
  // nothing it is read when the next one is armed.
  if (needs_map) settle_map();
  begin_use_anew();
  for (size_t i = 0; i < fires_seen_.size(); ++i) fires_expected_[i] = std::max(1, fires_seen_[i]);
  if (observing_ && may_learn && replanned_at_ != step_) learn_order();
  drop_pending();
  has_sums_ = defers_;
  clock_.backward_ends();
}

void GradReducer::settle_map(bool late) {
  map_is_unread_ = false;
  used_.finish_reading();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const std::vector<BucketSlot>& slots = plan_.buckets[b].slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const int64_t index = slots[slot].parameter;
      if (places_[static_cast<size_t>(index)].bucket < 0 ||
          is_delivered_[static_cast<size_t>(index)])
        continue;
      if (used_.ranks_using(index) > 0) {
        deliver(buckets_[b], slot);
        if (delivered_) delivered_({index});
      } else {
        restore(buckets_[b], slot);
      }
    }
  }
  update_trailing();
  if (used_.changed_anywhere()) settle_change(late);
}

void GradReducer::shadow_backward(bool deliver) {
  {
    const std::lock_guard lock(mutex_);
    begin_backward(/*shadow=*/true);
    shadow_delivers_ = deliver;
  }
  collect_by_itself(/*may_learn=*/true);
}

void GradReducer::finalize_backward() {
  TORCH_CHECK(
      phase_ == Phase::kAwaitingFinalize,
      error_text(options_.area, "got finalize_backward() with no synchronized backward to finalize",
                 communicator_->rank_of(),
                 "Call it once after each backward whose forward was not under no_sync()."));
  collect();
}

bool GradReducer::should_finalize_after_backward() const { return manual_finalization_; }

void GradReducer::set_manual_finalization(bool manual) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(phase_ == Phase::kIdle,
              error_text(options_.area, "got a change of manual finalization while a backward runs",
                         communicator_->rank_of(),
                         "Change it before forward or after finalize_backward()."));
  manual_finalization_ = manual;
}

void GradReducer::set_comm_hook(std::shared_ptr<CommHook> hook) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(phase_ == Phase::kIdle && compressor_->is_plain_sum(),
              error_text(options_.area, "got a second communication hook, expected one per module",
                         communicator_->rank_of(),
                         "Combine the two in one hook (e.g. fp16_compress_wrapper)."));
  compressor_ = make_hook_compressor(std::move(hook));
  storages_.clear();  // a hook may average less than all ranks' gradients
  stream_.reset();
  plan_is_stale_ = true;
}

void GradReducer::set_divisor(double divisor) { divisor_ = divisor; }

void GradReducer::set_delivered_callback(DeliveredCallback callback) {
  const std::lock_guard lock(mutex_);
  delivered_ = std::move(callback);
}

StepReport GradReducer::last_step() const {
  const std::lock_guard lock(mutex_);
  return clock_.last();
}

}  // namespace trireme
