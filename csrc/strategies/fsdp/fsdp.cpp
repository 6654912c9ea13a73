#include <trireme/strategies/fsdp/fsdp.h>

#include <trireme/comm/subgroups.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/language.h>
#include <trireme/common/trace.h>
#include <trireme/module/backward_error.h>
#include <trireme/module/output_hook.h>

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <utility>

// See [Note: a step of fully sharded training] in fsdp.h.

namespace trireme {
namespace {

bool runs_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

std::shared_ptr<Fsdp> Fsdp::make(Request request) {
  const c10::InferenceMode no_inference(false);
  if (request.ranks_of.empty()) request.ranks_of.assign(request.groups.size(), 0);
  std::shared_ptr<Fsdp> made(new Fsdp(request));
  made->reducers_.tell_hook_errors([self = made->weak_from_this()](const std::string& what) {
    if (const auto alive = self.lock()) alive->tell_hook_error(what);
  });
  if (made->prefetch_.gathers()) {
    made->reducers_.ask_for_unused([self = made->weak_from_this()] {
      const auto alive = self.lock();
      return alive ? alive->unused_groups() : std::vector<bool>();
    });
    made->compare_gathers(request);
  }
  return made;
}

// See [Note: how ranks that differ find out] in param/prefetch.h.
void Fsdp::compare_gathers(const Request& request) {
  for (const FsdpRanks& ranks : request.ranks) prefetch_.watch(*ranks.communicator);
  reducers_.compare_numbers({.number =
                                 [self = weak_from_this()] {
                                   const auto alive = self.lock();
                                   if (!alive) return int64_t{0};
                                   // The rest of the pass belongs to it.
                                   if (alive->prefetch_.is_in_pass()) alive->end_pass_of_backward();
                                   return alive->prefetch_.gathered_hash();
                                 },
                             .share = prefetch_.share_in_sum(),
                             .refuse =
                                 [self = weak_from_this()] {
                                   if (const auto alive = self.lock())
                                     alive->prefetch_.refuse_difference();
                                 },
                             .world = communicator_->world()});
}

std::vector<bool> Fsdp::unused_groups() const {
  std::vector<bool> unused;
  for (const auto& group : groups_) unused.push_back(!prefetch_.may_have_been_needed(*group));
  return unused;
}

Fsdp::Fsdp(const Request& request)
    : groups_(request.groups),
      names_(request.names),
      communicator_(request.ranks.front().communicator),
      gates_(groups_, request.ranks_of),
      pool_(std::make_shared<BufferPool>(groups_.front()->device())),
      prefetch_(groups_, request.agrees_with),
      reducers_({groups_, names_, request.ranks, request.ranks_of, request.compression}),
      delivery_(std::make_shared<GradientDelivery>(groups_)) {
  for (const auto& group : groups_) group->memory().share_pool(pool_);
  for (Communicator* one : gatherers()) share_steps(*communicator_, *one);
}

// One forward of a unit that gathers, as backward sees it.
struct Fsdp::Use {
  uint64_t first_node = at::sequence_number::peek();  // autograd's next sequence number
  size_t inputs = 0;                                  // that get gradients
  int64_t backward = 0;                               // that has entered it
  size_t inputs_left = 0;
};

// See [Note: passes of several threads].
void Fsdp::begin_pass(bool is_root) {
  if (runs_backward()) return enter_backward();
  if (is_root) {
    turn_.take();
    return;
  }
  TORCH_CHECK(turn_.try_take(),
              error_text("fully_shard",
                         "got a forward of a unit during a forward or backward that another thread "
                         "makes of the model around it",
                         communicator_->rank_of(),
                         "Call the whole model, whose passes wait for each other."));
}

// Lets other threads pass, if this one has no forward open.
void Fsdp::end_pass() noexcept {
  if (turn_.is_own() && open_.empty()) turn_.give_back();
}

void Fsdp::pre_forward(const Forward& forward, const std::vector<at::Tensor>& inputs) {
  if (runs_backward()) {  // computed again by a checkpoint
    enter_backward();
    if (forward.is_root && forwards_in_backward_.empty())
      prefetch_.repeat_forward(forward.group.get());
    if (forward.group && forward.group->has_unsharded()) {  // for its backward, which needs it, too
      forward.group->wait_for_unshard();
      return forward.group->show_unsharded();
    }
  } else {
    // No forward lasts beyond a step: an open one was left without post_forward().
    if (forward.is_root || is_writing()) open_.clear();
    open_.push_back({forward.group.get(), forward.is_root, nullptr});
    if (open_.size() == 1) begin_forward(forward);
    if (forward.group && forward.group->gathers())
      open_.back().use = watch_inputs(forward.group, inputs);
  }
  if (!forward.group) return;
  prefetch_.need(*forward.group);
  forward.group->show_unsharded();
}

void Fsdp::begin_forward(const Forward& forward) {
  has_told_backward_ = false;
  if (tell_pass_) tell_pass_({false, forward.group});
  for (const auto& group : groups_) group->follow_requires_grad();
  if (prefetch_.gathers()) reducers_.meet_senders();
  reducers_.before_forward();
  begin_reading();
  prefetch_.begin_forward(forward.group.get(), at::GradMode::is_enabled());
}

// Watches the inputs of a unit: when the last of them has its gradient, backward has left the unit.
// A leaf cannot be watched so cheaply; then the unit stays until backward is over.
std::shared_ptr<Fsdp::Use> Fsdp::watch_inputs(const std::shared_ptr<ParamGroup>& group,
                                              const std::vector<at::Tensor>& inputs) {
  auto use = std::make_shared<Use>();
  if (!at::GradMode::is_enabled()) return use;
  std::vector<at::Tensor> watched;
  for (const at::Tensor& input : inputs) {
    if (!input.requires_grad()) continue;
    if (input.is_leaf()) return use;
    watched.push_back(input);
  }
  use->inputs = watched.size();
  for (const at::Tensor& input : watched) {
    on_gradient(input, [self = weak_from_this(), group, use] {
      if (const auto alive = self.lock()) alive->post_backward(*group, *use);
    });
  }
  return use;
}

void Fsdp::post_forward(const Forward& forward, const std::vector<at::Tensor>& outputs,
                        bool all_found) {
  if (runs_backward()) return;
  turn_.take();  // a forward inside of this one has given it back, if that was the root's
  const auto over = c10::make_scope_exit([this] { end_pass(); });
  const bool trains = at::GradMode::is_enabled();
  const std::shared_ptr<Use> use = close(forward);
  if (trains) watch_outputs(forward, outputs, use);
  if (forward.group && forward.group->flags().reshard_after_forward)
    prefetch_.done(*forward.group, /*hold=*/trains && !all_found);
  if (!open_.empty()) return;
  prefetch_.end_pass();
  if (trains) reducers_.after_forward(outputs, all_found);
}

// Closes a forward, and with it what is still open inside.
std::shared_ptr<Fsdp::Use> Fsdp::close(const Forward& forward) {
  const auto last = std::find_if(open_.rbegin(), open_.rend(), [&](const Open& one) {
    return one.group == forward.group.get() && one.is_root == forward.is_root;
  });
  if (last == open_.rend()) return nullptr;
  const auto first_closed = std::prev(last.base());
  std::shared_ptr<Use> use = std::move(first_closed->use);
  open_.erase(first_closed, open_.end());
  return use;
}

void Fsdp::watch_outputs(const Forward& forward, const std::vector<at::Tensor>& outputs,
                         const std::shared_ptr<Use>& use) {
  if (!forward.group && !forward.is_root) return;
  const Prefetch::Forward last = prefetch_.last_forward();
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    const auto arrived = [self = weak_from_this(), group = forward.group, use, last] {
      if (const auto alive = self.lock()) alive->pre_backward(group.get(), use.get(), last);
    };
    on_output_gradient(output, arrived, use ? use->first_node : 0);
  }
}

void Fsdp::abandon_forward(const Forward& forward, const std::string& reason) noexcept {
  if (runs_backward()) return;  // backward reports it, if it is more than a checkpoint's early end
  if (!turn_.try_take()) return;  // begin_pass() has refused it
  const auto over = c10::make_scope_exit([this] { end_pass(); });
  close(forward);
  try {  // the outputs may have been kept, and backward may come to them
    if (forward.group && forward.group->flags().reshard_after_forward)
      prefetch_.done(*forward.group, /*hold=*/at::GradMode::is_enabled());
  } catch (...) {  // no memory for a piece of the unit, which so stays unsharded
  }
  if (!open_.empty() || !prefetch_.is_in_pass()) return;
  prefetch_.reset();
  if (communicator_->world() == 1) return;
  const std::string what = "a forward was abandoned: " + one_line(reason);
  reducers_.announce_failure(abandoned_text(what));
  tell_gatherers(what);
}

std::string Fsdp::abandoned_text(const std::string& what) const {
  return error_text("fully_shard", what, communicator_->rank_of(), "See the traceback there");
}

// Tells the ranks that may wait for this one in a gather, of a unit or of its pieces, or to agree
// on an order.
void Fsdp::tell_gatherers(const std::string& what) noexcept {
  for (Communicator* gatherer : gatherers())
    if (!gatherer->failure()) gatherer->announce_failure(abandoned_text(what));
}

// Returns the communicators by which ranks gather, or agree on an order.
std::set<Communicator*> Fsdp::gatherers() const {
  std::set<Communicator*> found{prefetch_.communicator()};
  for (const auto& group : groups_) {
    found.insert(group->gathers_with().get());
    found.insert(group->reshards_with().get());
  }
  found.erase(nullptr);
  return found;
}

// Tells the other ranks of an exception in a hook: those on which it did not raise go on to their
// next step, and wait there for this one.
void Fsdp::tell_hook_error(const std::string& what) {
  if (communicator_->world() == 1) return;
  const std::string text = "an all-reduce hook raised: " + one_line(what);
  reducers_.announce_failure(abandoned_text(text));
  tell_gatherers(text);
}

void Fsdp::set_gradient_callback(GradientCallback callback) {
  reducers_.set_delivered_callback(
      [held = std::weak_ptr(delivery_),
       callback = std::move(callback)](const std::vector<int64_t>& parameters) {
        if (const auto delivery = held.lock()) callback(parameters, delivery->take(parameters));
      });
}

void Fsdp::keep_gradients() {
  reducers_.set_delivered_callback(
      [held = std::weak_ptr(delivery_)](const std::vector<int64_t>& parameters) {
        if (const auto delivery = held.lock()) delivery->keep(parameters);
      });
}

void Fsdp::set_memory_sources(BufferPool::Source gathered, const BufferPool::Source& gradients) {
  pool_->set_source(std::move(gathered));
  reducers_.set_memory_source(gradients);
}

void Fsdp::unshard(ParamGroup& group) {
  const ThreadTurn::Guard turn(turn_);
  prefetch_.need(group);
  group.show_unsharded();
}

void Fsdp::begin_unshard(ParamGroup& group) {
  const ThreadTurn::Guard turn(turn_);
  prefetch_.need_later(group);
}

void Fsdp::reshard(ParamGroup& group) {
  const ThreadTurn::Guard turn(turn_);
  prefetch_.drop(group);
}

void Fsdp::begin_reading() {
  const ThreadTurn::Guard turn(turn_);
  if (!is_writing()) return check_writes();
  TRIREME_TRACE("fsdp.begin_reading");
  const c10::InferenceMode no_inference(false);
  for (const auto& group : groups_) group->finish_writes();
  gates_.begin_reading();
  prefetch_.expire();
}

void Fsdp::begin_writing() {
  const ThreadTurn::Guard turn(turn_);
  if (is_writing()) return;
  TRIREME_TRACE("fsdp.begin_writing");
  check_writes();
  for (const auto& group : groups_) group->memory().finish_copies();
  const FactorRange own = delivery_->factor();
  const FactorRange of_all = gates_.begin_writing(own);
  for (const auto& group : groups_) group->bump_unsharded();  // no graph may read what comes
  delivery_->forget();
  check_factor(own, of_all, communicator_->rank_of());
}

// Refuses writes outside of the gate: a slower rank may have read while this one wrote; or the
// unsharded parameters are still those of before.
void Fsdp::check_writes() {
  size_t first = 0;
  for (const auto& group : groups_) {
    const std::vector<int64_t> changed = group->changed_outside();
    const bool is_kept = group->has_unsharded() || group->memory().has_pieces();
    if (!changed.empty() && !is_kept) {
      group->finish_writes();  // no rank has what was there before
    } else if (!changed.empty()) {
      const std::string name = names_[first + static_cast<size_t>(changed.front())];
      const std::string why = !group->gathers() ? "when other ranks of the host may be reading it"
                              : group->has_unsharded() ? "while it was kept unsharded"
                                                       : "while ranks kept pieces of it";
      for (const auto& one : groups_) one->finish_writes();  // report it once
      TORCH_CHECK(false, error_text("fully_shard",
                                    "parameter '" + name +
                                        "' was written after a forward and before "
                                        "optimizer.step(), " +
                                        why,
                                    communicator_->rank_of(),
                                    "Write it inside `with trireme.writing(model):` (C++: between "
                                    "begin_writing() and the next forward)."));
    }
    first += group->params().size();
  }
}

// Lives in the end callback of a backward, which autograd destroys uncalled if an exception leaves
// it.
class Fsdp::PostBackward {
 public:
  explicit PostBackward(std::shared_ptr<Fsdp> fsdp) : fsdp_(std::move(fsdp)) {}
  ~PostBackward() {
    if (fsdp_) fsdp_->abandon_backward(error_.text());
  }
  PostBackward(const PostBackward&) = delete;
  PostBackward& operator=(const PostBackward&) = delete;

  void finish() { std::exchange(fsdp_, nullptr)->finish_backward(); }

 private:
  std::shared_ptr<Fsdp> fsdp_;
  BackwardError error_;
};

void Fsdp::tell_passes(std::function<void(const PassStart&)> callback) {
  tell_pass_ = std::move(callback);
  if (!tell_pass_) return reducers_.set_armed_callback(nullptr);
  reducers_.set_armed_callback([self = weak_from_this()] {
    if (const auto alive = self.lock()) alive->tell_backward();
  });
}

void Fsdp::tell_backward() {
  if (tell_pass_ && !std::exchange(has_told_backward_, true)) tell_pass_({true});
}

void Fsdp::enter_backward() {
  const bool took_turn = device().is_cpu() && turn_.take();
  if (in_backward_) return;
  auto failed = c10::make_scope_exit([&] {
    if (took_turn) turn_.give_back();
  });
  tell_backward();
  in_backward_ = awaits_finalization_ = true;
  ++backward_;
  uses_in_backward_.clear();
  forwards_in_backward_.clear();
  prefetch_.begin_backward();
  const auto scope = std::make_shared<PostBackward>(shared_from_this());
  backward_took_turn_ = took_turn;
  failed.release();
  torch::autograd::Engine::get_default_engine().queue_callback([scope] { scope->finish(); });
}

// The backward that runs has reached a unit.
void Fsdp::pre_backward(ParamGroup* group, Use* use, const Prefetch::Forward& forward) {
  enter_backward();
  if (forwards_in_backward_.insert(forward.number).second) prefetch_.enter_forward(forward);
  if (group == nullptr) return;
  if (use != nullptr && use->backward != backward_) {
    use->backward = backward_;
    use->inputs_left = use->inputs;
    ++uses_in_backward_[group];
    prefetch_.need(*group);
  }
  group->show_unsharded();
}

// Called when the backward that runs has come to an input of a unit; with the last input it leaves
// the unit.
void Fsdp::post_backward(ParamGroup& group, Use& use) {
  if (use.backward != backward_ || --use.inputs_left > 0) return;
  if (--uses_in_backward_[&group] == 0 && group.flags().reshard_after_backward)
    prefetch_.done(group);
}

void Fsdp::shadow_forward(const std::shared_ptr<ParamGroup>& entry) {
  const ThreadTurn::Guard turn(turn_);
  begin_forward({entry});
  prefetch_.end_pass();
}

void Fsdp::shadow_backward() {
  const ThreadTurn::Guard turn(turn_);
  if (prefetch_.gathers()) {
    prefetch_.begin_backward();
    prefetch_.enter_forward(prefetch_.last_forward());
    prefetch_.gather_rest();  // the others reduce meanwhile
  }
  if (reducers_.synchronizes()) reducers_.shadow_backward();
  end_pass_of_backward();
}

void Fsdp::end_pass_of_backward() {
  prefetch_.end_pass(/*is_last=*/reducers_.synchronizes() && !manual_);
}

void Fsdp::finish_backward() {
  try {
    end_pass_of_backward();
  } catch (...) {
    abandon_backward(text_of(std::current_exception()));
    throw;
  }
  reshard_after_backward();
  if (!std::exchange(backward_took_turn_, false)) return;
  // Reducers heard of the backward later than this, and so finish it later.
  const std::shared_ptr<void> turn(
      nullptr, [self = shared_from_this()](void* /*none*/) { self->turn_.give_back(); });
  torch::autograd::Engine::get_default_engine().queue_callback([turn] {});
}

void Fsdp::abandon_backward(const std::string& why) noexcept {
  if (prefetch_.is_in_pass() && communicator_->world() > 1)
    tell_gatherers("a backward was abandoned" + (why.empty() ? why : ": " + why));
  prefetch_.reset();
  reshard_after_backward();
  if (std::exchange(backward_took_turn_, false)) turn_.give_back();
}

void Fsdp::reshard_after_backward() {
  in_backward_ = has_told_backward_ = false;
  for (const auto& group : groups_)
    if (group->flags().reshard_after_backward) group->show_sharded();
}

void Fsdp::set_manual_finalization(bool manual) {
  manual_ = manual;
  reducers_.set_synchronize(!manual_);
}

void Fsdp::finalize_backward() {
  const ThreadTurn::Guard turn(turn_);
  if (reducers_.synchronizes()) {
    TORCH_CHECK(
        !std::exchange(awaits_finalization_, false) || !reducers_.lack_gradients(),
        error_text("fully_shard",
                   "got finalize_backward() after backwards that brought no parameter a gradient",
                   communicator_->rank_of(),
                   in_language({.cpp = "Compute gradients by backward() alone.",
                                .python = "Compute gradients by backward() alone; run pipelines "
                                          "whose backwards come in two halves by a schedule of "
                                          "trireme.pipelining."})));
    reducers_.reduce_accumulated();
    prefetch_.forget_pieces();
  }
  reshard_after_backward();
}

void Fsdp::reset() {
  turn_.take();
  const auto over = c10::make_scope_exit([this] { turn_.give_back(); });
  open_.clear();
  prefetch_.reset();
  for (const auto& group : groups_) group->show_sharded();
  reducers_.drop_accumulated();
}

}  // namespace trireme
