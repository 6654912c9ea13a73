#include <trireme/param/prefetch.h>

#include <trireme/comm/c10d/c10d_wait.h>
#include <trireme/comm/c10d/custom_communicator.h>
#include <trireme/comm/group_health.h>
#include <trireme/common/error.h>
#include <trireme/common/language.h>
#include <trireme/common/trace.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

// See [Note: in which order units are gathered] in prefetch.h.

namespace trireme {
namespace {

constexpr int64_t kNothing = -1;      // this rank needs no more
constexpr size_t kMostForwards = 64;  // forwards whose order is kept for backward
constexpr std::chrono::milliseconds kPatience{2000};
constexpr Advice kUseAlike{
    .cpp =
        "Let all ranks run the same passes, and use a unit as often as the others do. Call "
        "set_dynamic_gather(true) on the model if ranks use different units.",
    .python =
        "Let all ranks run the same passes, and use a unit as often as the others do. Call "
        "set_dynamic_gather(True) on the model if ranks use different units."};

}  // namespace

Prefetch::Prefetch(const std::vector<std::shared_ptr<ParamGroup>>& groups,
                   const std::shared_ptr<Communicator>& agrees_with) {
  for (const auto& group : groups)
    if (group->gathers()) groups_.push_back(group);
  if (!groups_.empty())
    communicator_ = plain_of(agrees_with ? agrees_with : groups_.front()->gathers_with());
  states_.resize(groups_.size());
  if (groups_.empty()) return;
  meeting_ = std::make_unique<MeetingPlace>(communicator_->health());
  crossed_ = std::make_unique<CrossedWaits>(communicator_->health());
  crossed_->add(meeting_->progress());
  watch(*communicator_);
  for (const auto& group : groups_) {
    watch(*group->gathers_with());
    if (group->reshards_with()) watch(*group->reshards_with());
  }
}

Prefetch::~Prefetch() {
  for (const auto& health : watched_) health->drop_watch(this);
}

void Prefetch::watch(const Communicator& communicator) {
  const std::shared_ptr<GroupHealth> health = communicator.health();
  const bool has_all = communicator_ && communicator.world() >= communicator_->world();
  if (!health || !has_all) return;
  crossed_->add(health->shared_progress());
  health->set_watch(this, [this] { return waits_in_vain(); });
  watched_.push_back(health);
}

Prefetch::Index Prefetch::index_of(const ParamGroup* group) const {
  for (size_t i = 0; i < groups_.size(); ++i)
    if (groups_[i].get() == group) return static_cast<Index>(i);
  return kNothing;
}

bool Prefetch::reshards(Index index) const {
  const ParamGroup& group = *groups_[static_cast<size_t>(index)];
  return pass_ == Pass::kBackward ? group.flags().reshard_after_backward
                                  : group.flags().reshard_after_forward;
}

void Prefetch::begin_forward(const ParamGroup* entry, bool trains) {
  if (groups_.empty()) {
    ++forward_.number;
    return;
  }
  begin_pass(Pass::kForward);
  forward_ = {{index_of(entry), trains}, forward_.number + 1};
  const Plan* known = dynamic_ ? nullptr : plans_.find(forward_.key);
  learns_ = known == nullptr;
  if (known) plan_ = *known;
  // Ranks that all know other plans may not all come to a kind of pass that is new.
  if (learns_ && !dynamic_ && !plans_.is_empty() && !plans_.find_last(forward_.key))
    meet("has not run before");
}

void Prefetch::begin_pass(Pass pass) {
  for (State& state : states_) state.claims = 0;  // left by an exception
  pass_ = pass;
  plan_.clear();
  next_ = 0;
  left_.reset();
}

void Prefetch::begin_backward() {
  if (groups_.empty() || pass_ == Pass::kBackward) return;
  begin_pass(Pass::kBackward);
  learns_ = dynamic_;
}

void Prefetch::enter_forward(const Forward& forward) {
  if (learns_) return;
  const auto own = gathered_.find(forward.number);
  const Plan* plan = own == gathered_.end() ? plans_.find_last(forward.key) : &own->second;
  if (!plan) return;
  const Plan& used = *plan;
  const Index entry = forward.key.first;
  const bool has_entry = !used.empty() && used.front() == entry;
  if (has_entry) plan_.push_back(entry);
  plan_.insert(plan_.end(), used.rbegin(), used.rend() - (has_entry ? 1 : 0));
}

void Prefetch::repeat_forward(const ParamGroup* entry) {
  const Plan* forward = plans_.find_last({index_of(entry), false});
  if (learns_ || !forward) return;
  plan_.insert(plan_.end(), forward->begin(), forward->end());
}

bool Prefetch::may_have_been_needed(const ParamGroup& group) const {
  const Index index = index_of(&group);
  return index == kNothing || states_[static_cast<size_t>(index)].was_needed;
}

void Prefetch::claim(Index index) {
  State& state = state_of(index);
  if (pass_ == Pass::kForward && forward_.key.second) state.was_used = true;
  if (state.claims > 0) return;
  if (learns_) {
    agree(index);
  } else if (!gather_up_to(index) && !groups_[static_cast<size_t>(index)]->has_unsharded()) {
    leave_plan(index);
  }
}

void Prefetch::need_later(ParamGroup& group) {
  const Index index = index_of(&group);
  if (index == kNothing) return;
  state_of(index).was_needed = true;
  if (pass_ != Pass::kNone) return claim(index);
  if (!group.has_unsharded()) gather_now(index);
  state_of(index).is_kept = true;
}

void Prefetch::need(ParamGroup& group) {
  const Index index = index_of(&group);
  if (index == kNothing) return;
  need_later(group);
  State& state = state_of(index);
  state.claims = std::max<int64_t>(state.claims - 1, 0);
  // It is kept, and backward comes back to it as often: the first time must not take its memory.
  if (pass_ == Pass::kForward && forward_.key.second && ++state.uses > 1 && !reshards(index))
    state.is_held = true;
  if (pass_ != Pass::kNone && !learns_) gather_ahead(index);
  group.wait_for_unshard();
}

bool Prefetch::comes_again(Index index) const {
  return std::find(plan_.begin() + static_cast<int64_t>(next_), plan_.end(), index) != plan_.end();
}

void Prefetch::done(ParamGroup& group, bool hold) {
  const Index index = index_of(&group);
  if (index == kNothing) return group.show_sharded();
  State& state = state_of(index);
  state.is_held = state.is_held || hold;
  // A kept unit is not gathered again at its next place.
  const bool stays_kept = state.is_kept && (!reshards(index) || learns_ || comes_again(index));
  const bool stays = state.claims > 0 || state.is_held || stays_kept;
  stays ? group.show_sharded() : group.reshard();
}

void Prefetch::drop(ParamGroup& group) {
  const Index index = index_of(&group);
  if (index != kNothing && pass_ == Pass::kNone) state_of(index).is_kept = false;
  if (index != kNothing && pass_ != Pass::kNone) return done(group);
  group.reshard();
}

// Tells the others which unit this rank needs, and gathers those of all ranks. Returns whether any
// rank still needs one.
bool Prefetch::agree(Index wanted) {
  enum Said : int64_t { kWanted, kHash, kUsed, kNeeded, kCount };
  const GatherPlans::Left left = left_.value_or(GatherPlans::Left());
  const int64_t hash = gathered_hash();
  // Exchanges numbers on the CPU if possible, where waits watch the other ranks.
  const auto on_host = at::TensorOptions().dtype(at::kLong);
  const auto options = on_host.device(communicator_->device());
  const at::Tensor all = at::empty({communicator_->world() * kCount}, options);
  const at::Tensor own =
      at::tensor({wanted, hash, left.used, left.needed}, on_host).to(options.device());
  communicator_->all_gather({all}, {own}, "units that ranks need").wait();
  const at::Tensor host = all.cpu();
  const int64_t* said = host.const_data_ptr<int64_t>();
  std::set<Index> needed;
  int64_t most[kCount] = {};
  bool is_alike = true;
  for (int64_t rank = 0; rank < communicator_->world(); ++rank, said += kCount) {
    needed.insert(said[kWanted]);
    is_alike = is_alike && said[kHash] == hash;
    for (int64_t i = 0; i < kCount; ++i) most[i] = std::max(most[i], said[i]);
  }
  if (!is_alike) refuse_difference();
  if (left_) {
    left_->used = most[kUsed];
    left_->needed = most[kNeeded];
  }
  needed.erase(kNothing);
  for (const Index index : needed) {
    plan_.push_back(index);
    gather_next();
    if (wanted == kNothing) leave(index, /*is_last=*/false);
  }
  return !needed.empty();
}

// Leaves the plan together with all other ranks, since this one needs a unit without a place there.
void Prefetch::leave_plan(Index wanted) {
  GatherPlans::Left& left = left_.emplace();
  for (size_t place = 0; place < next_; ++place) {
    if (state_of(plan_[place]).claims > 0) continue;
    left.used = static_cast<int64_t>(place) + 1;
    ++left.needed;
  }
  // Ranks that are behind gather the units of the others.
  left.gathered = meet("needs unit '" + groups_[static_cast<size_t>(wanted)]->label() +
                       "', for which the learned order has no place any more");
  while (next_ < std::min(plan_.size(), static_cast<size_t>(left.gathered))) gather_next();
  plan_.resize(next_);
  learns_ = true;
  agree(wanted);
}

// Keeps the gathers of this pass, which are the same on all ranks.
void Prefetch::learn_plan() {
  if (pass_ != Pass::kForward) return;
  if (left_) {
    left_->instead.assign(plan_.begin() + left_->gathered, plan_.end());
    plans_.leave(forward_.key, *left_, plan_);
  } else {
    plans_.learn(forward_.key, plan_);
  }
  if (!forward_.key.second) return;
  if (gathered_.size() == kMostForwards) gathered_.erase(gathered_.begin());
  gathered_[forward_.number] = plan_;
}

// Waits for all ranks, which say why they come ("needs unit 'a'"), and returns how many places of
// the plan any of them has gathered.
int64_t Prefetch::meet(const std::string& why) {
  const std::vector<int64_t> places = meeting_->meet(
      static_cast<int64_t>(next_),
      "all ranks in a " + std::string(pass_ == Pass::kForward ? "forward" : "backward") + " that " +
          why + ", after gather " + std::to_string(log_.count()));
  return *std::max_element(places.begin(), places.end());
}

std::optional<std::string> Prefetch::waits_in_vain() {
  const std::optional<std::string> crossed = crossed_->look();
  if (!crossed) return std::nullopt;
  const std::string text =
      error_text("fully_shard", *crossed, communicator_->rank_of(), in_language(kUseAlike));
  communicator_->announce_failure(text);
  return text;
}

void Prefetch::refuse_difference() {
  std::vector<std::string> names;
  for (const auto& group : groups_) names.push_back(group->label());
  const std::vector<std::string> texts = meeting_->exchange(log_.text(), kPatience);
  const std::string found = GatherLog::difference(texts, names);
  // A collective that fails on a device leaves any number behind, and this rank may read it before
  // it hears of the error.
  if (found.empty() && std::count(texts.begin(), texts.end(), "") > 0)
    rethrow_named("comparison of what ranks gathered", *health_of(*communicator_),
                  [] { throw std::runtime_error("not all ranks have said what they gathered"); });
  const std::string text = error_text(
      "fully_shard",
      "ranks have gathered units in different orders, so that what came of it is wrong: " +
          (found.empty() ? "see the errors of other ranks" : found),
      communicator_->rank_of(), in_language(kUseAlike));
  communicator_->announce_failure(text);
  C10_THROW_ERROR(DistBackendError, text);
}

int64_t Prefetch::share_in_sum() const {
  const std::shared_ptr<GroupHealth> health = communicator_->health();
  if (health && health->is_fake) return 0;
  const RankOf where = communicator_->rank_of();
  return where.rank + 1 < where.world ? 1 : 1 - where.world;
}

void Prefetch::gather_next() {
  const Index index = plan_[next_++];
  ++state_of(index).claims;
  gather(index);
}

void Prefetch::gather(Index index) {
  State& state = state_of(index);
  if (state.is_kept) return;
  gather_now(index);
  state.is_kept = !reshards(index);
}

void Prefetch::gather_now(Index index) {
  log_.note(index, pass_);
  groups_[static_cast<size_t>(index)]->unshard();
}

// Returns whether the plan has a place for the unit.
bool Prefetch::gather_up_to(Index index) {
  const auto ahead = std::find(plan_.begin() + static_cast<int64_t>(next_), plan_.end(), index);
  if (ahead == plan_.end()) return false;
  for (const auto end = static_cast<size_t>(ahead - plan_.begin()) + 1; next_ < end;) {
    gather_next();
    const Index gathered = plan_[next_ - 1];
    if (gathered != index) drop_unused(gathered);
  }
  return true;
}

// Drops a unit that no forward of this rank has used: its backward does not need it.
void Prefetch::drop_unused(Index index) {
  State& state = state_of(index);
  if (pass_ != Pass::kBackward || state.was_used || state.is_kept) return;
  state.claims = 0;
  groups_[static_cast<size_t>(index)]->reshard();
}

void Prefetch::gather_ahead(Index index) {
  const State& state = state_of(index);
  const int which = pass_ == Pass::kForward ? 0 : 1;
  if (!state.has_ahead[which]) {
    if (next_ < plan_.size()) gather_next();
    return;
  }
  for (const Index next : state.ahead[which])
    if (state_of(next).claims == 0) gather_up_to(next);
}

void Prefetch::gather_rest() {
  while (next_ < plan_.size()) gather_next();
}

void Prefetch::gather_for_others(bool is_last) {
  if (learns_) {
    while (agree(kNothing)) {
    }
  }
  Index before = kNothing;
  while (next_ < plan_.size()) {
    gather_next();
    if (before != kNothing) leave(before, is_last);
    before = plan_[next_ - 1];
  }
  if (before != kNothing) leave(before, is_last);
}

// Drops a unit that this rank does not need any more in this pass. Its state for all ranks stays as
// it is until the pass is over for them, too.
void Prefetch::leave(Index index, bool is_last) {
  State& state = state_of(index);
  if (state.is_kept || !reshards(index)) return;
  if (pass_ == Pass::kBackward) state.is_held = false;
  if (state.is_held) return;
  state.claims = 0;
  ParamGroup& group = *groups_[static_cast<size_t>(index)];
  if (is_last && !learns_ && !comes_again(index)) group.memory().forget_pieces();
  groups_[static_cast<size_t>(index)]->reshard();
}

void Prefetch::end_pass(bool is_last) {
  if (pass_ == Pass::kNone) return;
  TRIREME_TRACE("prefetch.end_pass");
  for (size_t i = 0; i < groups_.size(); ++i) leave(static_cast<Index>(i), is_last);
  gather_for_others(is_last);
  if (is_last) forget_pieces();
  for (size_t i = 0; i < groups_.size(); ++i) {
    State& state = states_[i];
    state.claims = 0;
    if (pass_ == Pass::kBackward) {
      state.is_held = false;
      state.uses = 0;
    }
    groups_[i]->wait_for_unshard();
    if (!reshards(static_cast<Index>(i))) continue;
    state.is_kept = false;
    state.is_held ? groups_[i]->show_sharded() : groups_[i]->reshard();
  }
  if (learns_) learn_plan();
  pass_ = Pass::kNone;
}

void Prefetch::forget_pieces() {
  for (const auto& group : groups_) group->memory().forget_pieces();
}

void Prefetch::reset() noexcept {
  pass_ = Pass::kNone;
  for (size_t i = 0; i < groups_.size(); ++i) {
    states_[i].claims = states_[i].uses = 0;
    states_[i].is_kept = states_[i].is_held = false;
    try {
      groups_[i]->reshard();
    } catch (...) {  // the group has failed; the next verb says so
    }
  }
}

void Prefetch::expire() {
  gathered_.clear();  // no graph goes on over a step
  forget_pieces();    // before they are copied
  for (size_t i = 0; i < groups_.size(); ++i) {
    groups_[i]->reshard();
    states_[i].is_kept = states_[i].is_held = false;
    states_[i].was_used = states_[i].was_needed = false;
    states_[i].uses = 0;
  }
}

void Prefetch::set_ahead(const ParamGroup& group, int which,
                         const std::vector<const ParamGroup*>& ahead) {
  const Index index = index_of(&group);
  if (index == kNothing) return;
  State& state = state_of(index);
  state.has_ahead[which] = true;
  state.ahead[which].clear();
  for (const ParamGroup* later : ahead)
    if (const Index other = index_of(later); other != kNothing) state.ahead[which].push_back(other);
}

void Prefetch::set_forward_prefetch(const ParamGroup& group,
                                    const std::vector<const ParamGroup*>& ahead) {
  set_ahead(group, 0, ahead);
}

void Prefetch::set_backward_prefetch(const ParamGroup& group,
                                     const std::vector<const ParamGroup*>& ahead) {
  set_ahead(group, 1, ahead);
}

void Prefetch::set_dynamic(bool dynamic) {
  dynamic_ = dynamic;
  plans_.clear();
}

}  // namespace trireme
