#include <trireme/grad/grad_reducer.h>

#include <trireme/common/exception_text.h>
#include <trireme/common/trace.h>
#include <trireme/grad/collective_transport.h>
#include <trireme/grad/hook_transport.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

// See [Note: transport and delivery] in grad_reducer.h.

namespace trireme {

using Clock = StepClock::Clock;

std::shared_ptr<GradReducer> GradReducer::make(const NamedParameters& parameters,
                                               GradReducerParts parts,
                                               const GradReducerOptions& options) {
  std::shared_ptr<GradReducer> made(new GradReducer(parameters, std::move(parts), options));
  made->trigger_->lead(made);
  return made;
}

GradReducer::GradReducer(const NamedParameters& parameters, GradReducerParts parts,
                         const GradReducerOptions& options)
    : communicator_(std::move(parts.communicator)),
      trigger_(std::move(parts.trigger)),
      delivery_(std::move(parts.delivery)),
      transports_(parts.transport ? std::move(parts.transport)
                                  : std::make_unique<CollectiveTransport>(communicator_)),
      checks_(options.area, communicator_->rank_of()),
      layout_({options.caps, options.reduce_dtype, options.reduce_dtypes, options.bucket_prefix,
               delivery_->traits().own_shards},
              parameters),
      changes_({.layout = layout_,
                .communicator = *communicator_,
                .delivery = *delivery_,
                .sink = *this,
                .area = options.area,
                .hooks_before = trigger_->is_at_parameters(),
                .compares_moved_values = options.compares_moved_values}),
      queue_(layout_, *delivery_, clock_),
      failed_(options.failed) {
  set_divisor(static_cast<double>(communicator_->world()));
  begin_with(parameters);
  build_layout();
}

void GradReducer::begin_with(const NamedParameters& parameters) {
  layout_.begin(parameters, step_);
  changes_.begin();
  delivery_->begin(layout_);
  put_deferred_sync(parameters.tensors, trigger_);
}

void GradReducer::build_layout() {
  const TransportTraits& traits = transports_.own().traits();
  layout_.build({.has_stream = transports_.has_stream(),
                 .carries_tail = traits.carries_map && !delivery_->traits().may_defer_sums,
                 .takes_runs = traits.takes_runs});
}

// Checks for changes since the last step: of the group, of the user's parameters.
void GradReducer::look_around() {
  communicator_->recover();
  if (const auto failure = communicator_->failure())
    checks_.refuse_after(*failure, trigger_->is_at_parameters());
  checks_.expect(!trigger_->awaits_finalization(),
                 "got a forward before finalize_backward(), expected one call of it after every "
                 "synchronized backward",
                 "Call finalize_backward(), or turn manual finalization off.");
  if (trigger_->is_idle()) changes_.watch_parameters();
}

void GradReducer::forward_begins() {
  look_around();
  checks_.expect(!trigger_->take_unreached(),
                 "got a forward after prepare_for_backward(), and no backward in between that "
                 "reached a parameter",
                 {.cpp = "Run the backward first.",
                  .python = "Run the backward first; run pipelines whose backwards come in two "
                            "halves by a schedule of trireme.pipelining."});
  clock_.forward_begins();
}

void GradReducer::forward_ends() {
  if (trigger_->is_idle()) changes_.look_at_module();
  clock_.forward_ends();
}

// Begins at the same place in the sequence of collectives on every rank.
void GradReducer::begin_backward(Part part) {
  checks_.expect(trigger_->is_idle(), "got a second backward before finalize_backward()",
                 "Call finalize_backward() once per synchronized backward.");
  if (map_is_unread_) read_map(/*late=*/true);
  if (auto order = layout_.arrivals().receive(*communicator_)) layout_.set_order(std::move(*order));
  if (transports_.own().traits().keeps_buckets && !layout_.arrivals().is_observing())
    keep_buckets();
  part_ = part;
  makes_graph_ = at::GradMode::is_enabled();
  changes_.look_again(is_shadow());
  delivery_->before_backward();
  communicator_->show_step(++step_, /*is_done=*/false);
  checks_.begin_step();
  layout_.arrivals().begin_step();
  begin_step();
  clock_.backward_begins(step_, transports_.chosen().traits().streams);
}

// Begins with the buckets of the step.
void GradReducer::begin_step() {
  build_layout();
  for (const auto& bucket : layout_.buckets()) bucket->begin_step(is_shadow());
  changes_.leave_out_changed();
  begin_transport();
}

void GradReducer::begin_transport() {
  Transport& transport = transports_.choose(layout_);
  transport.begin({.buckets = layout_.buckets(),
                   .labels = layout_.labels(),
                   .parameters = &layout_.infos(),
                   .tensors = &layout_.parameters(),
                   .scale = scale(),
                   .map = layout_.carries_tail() ? &layout_.used() : nullptr,
                   .shadow = is_shadow(),
                   .defers_sums = delivery_->defers_step()});
  delivery_->begin_step({transport, /*touches_gradients=*/part_ != Part::kZeros, makes_graph_});
  queue_.begin({&transport, scale(), is_shadow(), trigger_->is_manual()}, unused_);
}

void GradReducer::gradient_due(int64_t index) {
  const auto parameter = static_cast<size_t>(index);
  or_failed([&] {
    {
      const auto lock = trigger_->lock();
      delivery_->coming(parameter);
    }
    trigger_->gradient_due();
  });
  const auto lock = trigger_->lock();
  if (trigger_->is_idle()) delivery_->due(parameter);
}

void GradReducer::gradient_ready(int64_t index, bool has_gradient) {
  or_failed([&] { take_gradient(index, has_gradient); });
}

void GradReducer::take_gradient(int64_t index, bool has_gradient) {
  const auto lock = trigger_->lock();
  const auto parameter = static_cast<size_t>(index);
  const size_t count = layout_.parameters().size();
  if (parameter >= count) return newcomer_ready(parameter - count, has_gradient);
  if (has_gradient) layout_.used().mark_used(index);
  if (!trigger_->is_running()) delivery_->accumulated(parameter);
  if (!trigger_->gradient_came()) return;
  // Autograd runs this without grad mode, unless the backward makes a graph.
  std::optional<at::NoGradGuard> no_grad;
  if (makes_graph_) no_grad.emplace();
  const bool is_last = layout_.arrivals().arrived(index);
  if (has_gradient) check(layout_.parameters()[parameter], layout_.infos()[parameter].name);
  const BucketPlace place = layout_.place_of(parameter);
  if (layout_.is_excluded(parameter)) return delivery_->accumulated(parameter);
  if (!place.is_planned()) return;  // unfrozen or cast since; see [Note: a module that changes]
  const auto bucket = static_cast<size_t>(place.bucket);
  const auto slot = static_cast<size_t>(place.slot);
  Transport& transport = transports_.chosen();
  if (queue_.has_launched(bucket) || transport.has_taken(bucket, slot))
    checks_.refuse_late(layout_.infos()[parameter].name);
  if (has_gradient) {
    delivery_->came(parameter);
    if (!finds_buckets()) transport.accumulated(bucket, slot);
  }
  slot_ready(parameter, place, is_last);
}

void GradReducer::slot_ready(size_t parameter, BucketPlace place, bool is_last) {
  const auto bucket = static_cast<size_t>(place.bucket);
  if (!is_expected(parameter)) {
    unused_[parameter] = false;
    queue_.wait_for_one_more(bucket);
  }
  if (!is_last) return;
  queue_.stop_waiting_for_one(bucket);
  if (layout_.arrivals().is_observing()) return;
  Transport& transport = transports_.chosen();
  const bool streams = transport.traits().streams;
  if (streams) {
    transport.ready(bucket, static_cast<size_t>(place.slot));
    if (transport.is_behind() && trigger_->leads_siblings()) catch_up();
  }
  if (!queue_.can_launch()) return;
  if (streams || (trigger_->leads_siblings() && !transport.launch_waits())) queue_.launch_ready();
}

void GradReducer::newcomer_ready(size_t newcomer, bool has_gradient) {
  const at::Tensor& tensor = changes_.newcomer_came(newcomer, has_gradient);
  if (trigger_->gradient_came() && has_gradient) check(tensor, /*name=*/{});
}

void GradReducer::catch_up() {
  const auto begin = Clock::now();
  transports_.chosen().catch_up();
  clock_.waited(Clock::now() - begin);
}

// Learns the order of gradients while all of them are still in .grad.
void GradReducer::find_buckets() {
  layout_.arrivals().send(*communicator_, layout_.order(), layout_.device());
  layout_.set_order(layout_.arrivals().wait());
  keep_buckets();
  begin_step();
}

void GradReducer::launch_rest() {
  if (finds_buckets()) find_buckets();
  queue_.launch_rest();
  if (!layout_.carries_tail() && !transports_.chosen().traits().map_goes_last) send_map();
}

void GradReducer::finish_backward() {
  TRIREME_TRACE("grad_reducer.finish_backward");
  const at::NoGradGuard no_grad;
  or_failed([this] {
    launch_rest();
    if (trigger_->is_manual()) return trigger_->await_finalization();
    collect();
  });
}

// Waits for everything that is in flight and brings every .grad to its final value.
void GradReducer::collect(bool may_learn) {
  const at::NoGradGuard no_grad;
  trigger_->end();  // also if a wait throws
  queue_.deliver_rest();
  if (transports_.chosen().traits().map_goes_last) send_map();
  const auto begin = Clock::now();
  map_pending_.wait();
  map_pending_ = {};
  clock_.waited(Clock::now() - begin);
  queue_.deliver_shown();

  map_is_unread_ = true;
  UsedMap& used = layout_.used();
  used.start_reading(layout_.carries_tail() ? layout_.buckets().back()->tail()
                                            : used.own_wire(layout_.device()));
  if (needs_map()) read_map();
  // Uses that no .grad holds yet count for the next synchronization.
  used.begin_anew(
      [this](size_t index, bool is_used) { return delivery_->still_counts(index, is_used); });
  layout_.arrivals().end_step();
  if (may_learn && layout_.arrivals().has_observed()) learn_order();
  queue_.drop();
  delivery_->after_backward();
  transports_.chosen().delivered();
  const SentCodes sent = transports_.chosen().sent();
  clock_.codes_sent(sent.bytes, sent.encode_ms);
  clock_.backward_ends();
  communicator_->show_step(step_, /*is_done=*/true);
}

void GradReducer::send_map() {
  UsedMap& used = layout_.used();
  const at::Tensor& counts = used.own_wire(layout_.device());
  if (comparison_.number) used.compare(comparison_.number(), comparison_.share, comparison_.world);
  used.write_to(counts, is_shadow());
  map_pending_ = transports_.own().reduce_map(counts);
}

// Returns whether to read the map now. On devices reading waits for this backward; if this rank
// used everything and changed nothing, it is read when the next one is armed.
bool GradReducer::needs_map() const {
  return layout_.device().is_cpu() || layout_.used().changed_here() ||
         layout_.arrivals().is_observing() || !queue_.has_delivered_all();
}

void GradReducer::read_map(bool late) {
  const at::NoGradGuard no_grad;
  map_is_unread_ = false;
  layout_.used().finish_reading();
  if (layout_.used().numbers_differ()) comparison_.refuse();
  queue_.deliver_by_map();
  layout_.update_trailing(step_, communicator_->world());
  if (layout_.used().changed_anywhere()) agree_on_changes(late);
}

void GradReducer::agree_on_changes(bool late) {
  const ParameterChanges::Agreement agreement = changes_.agree(late, step_);
  if (agreement.parameters) {
    begin_with(*agreement.parameters);
    changes_.adopt(agreement);
  }
  if (!agreement.left_out.empty())
    queue_.reduce_extra_bucket(transports_.own(), scale(), agreement.left_out, agreement.used);
  if (agreement.parameters) build_layout();  // behind what a hook was shown beside it
}

// Sends rank 0's order to everybody at the end of the first synchronized backward.
void GradReducer::learn_order() {
  StreamTransport::Options options{.sharded = static_cast<bool>(delivery_->traits().own_shards)};
  if (delivery_->traits().may_defer_sums)
    options.bytes = std::max(options.bytes, StreamTransport::bytes_for(layout_.infos()));
  transports_.ask_for_stream(communicator_, layout_, options);
  layout_.arrivals().send(*communicator_, layout_.order(), layout_.device());
}

// Collects without a backward, whose end would tell the others of an exception: tells them itself.
void GradReducer::collect_by_itself(Part part, bool may_learn) {
  const at::NoGradGuard no_grad;
  or_failed([&] {
    trigger_->begin_by_itself(part);
    try {
      launch_rest();
      collect(may_learn);
    } catch (...) {
      abandon_backward(text_of(std::current_exception()));
      throw;
    }
  });
}

// Learns the order of gradients as a backward does: on other ranks it is one.
void GradReducer::reduce_without_backward(bool all) {
  or_failed([&] {
    const auto lock = trigger_->lock();
    look_around();
    const auto& parameters = layout_.parameters();
    for (size_t i = 0; all && i < parameters.size(); ++i)
      if (parameters[i].grad().defined()) layout_.used().mark_used(static_cast<int64_t>(i));
  });
  collect_by_itself(Part::kGradients, /*may_learn=*/true);
}

void GradReducer::abandon_backward(const std::string& why) noexcept {
  try {
    const int64_t last = layout_.arrivals().last_arrived();
    announce_failure(checks_.text_of_abandoned(
        step_, last < 0 ? "" : layout_.infos()[static_cast<size_t>(last)].name, why));
  } catch (
      ...) {  // out of memory while dying of something else: the peers see their deadline instead
  }
  const auto lock = trigger_->lock();
  communicator_->show_step(step_, /*is_done=*/true);
  layout_.arrivals().abandon_step();
  queue_.drop();
  transports_.chosen().abandoned();
  trigger_->end();
  delivery_->abandon(queue_.is_delivered());
}

bool GradReducer::lacks_gradients() const {
  const auto lock = trigger_->lock();
  const auto& infos = layout_.infos();
  return !layout_.used().any_used_here() &&
         std::any_of(infos.begin(), infos.end(),
                     [](const auto& info) { return info.requires_grad; });
}

void GradReducer::finalize_backward() {
  checks_.expect(trigger_->awaits_finalization(),
                 "got finalize_backward() with no synchronized backward to finalize",
                 "Call it once after each backward whose forward was not under no_sync().");
  collect();
}

void GradReducer::set_manual_finalization(bool manual) {
  const auto lock = trigger_->lock();
  checks_.expect(trigger_->is_idle(), "got a change of manual finalization while a backward runs",
                 "Change it before forward or after finalize_backward().");
  trigger_->set_manual(manual);
}

void GradReducer::set_comm_hook(std::shared_ptr<CommHook> hook) {
  const auto lock = trigger_->lock();
  checks_.expect(trigger_->is_idle() && !transports_.own().traits().keeps_buckets,
                 "got a second communication hook, expected one per module",
                 "Combine the two in one hook (e.g. fp16_compress_wrapper).");
  transports_.replace(
      std::make_unique<HookTransport>(communicator_, std::move(hook), layout_.parameters()));
  changes_.stop_comparing();  // a hook may average less than all ranks' gradients
  layout_.make_stale();
}

}  // namespace trireme
