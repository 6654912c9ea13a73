#include <trireme/param/prefetch.h>

#include <trireme/comm/c10d/custom_communicator.h>
#include <trireme/common/error.h>
#include <trireme/common/trace.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <string>

// See [Note: in which order units are gathered] in prefetch.h.

namespace trireme {
namespace {

constexpr int64_t kNothing = -1;  // this rank needs no more

}  // namespace

Prefetch::Prefetch(const std::vector<std::shared_ptr<ParamGroup>>& groups,
                   const std::shared_ptr<Communicator>& agrees_with) {
  for (const auto& group : groups)
    if (group->gathers()) groups_.push_back(group);
  if (!groups_.empty())
    communicator_ = plain_of(agrees_with ? agrees_with : groups_.front()->gathers_with());
  states_.resize(groups_.size());
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
  if (groups_.empty()) return;
  for (State& state : states_) state.claims = 0;  // left by an exception
  pass_ = Pass::kForward;
  key_ = {index_of(entry), trains};
  const auto known = plans_.find(key_);
  learns_ = dynamic_ || known == plans_.end();
  plan_ = learns_ ? Plan() : known->second;
  next_ = 0;
}

void Prefetch::begin_backward() {
  if (groups_.empty() || pass_ == Pass::kBackward) return;
  for (State& state : states_) state.claims = 0;
  pass_ = Pass::kBackward;
  learns_ = dynamic_;
  plan_.clear();
  next_ = 0;
}

void Prefetch::enter_forward(const Key& key) {
  const auto forward = plans_.find(key);
  if (learns_ || forward == plans_.end()) return;
  const Plan& used = forward->second;
  const bool has_entry = !used.empty() && used.front() == key.first;
  if (has_entry) plan_.push_back(key.first);
  plan_.insert(plan_.end(), used.rbegin(), used.rend() - (has_entry ? 1 : 0));
}

void Prefetch::repeat_forward(const ParamGroup* entry) {
  const auto forward = plans_.find({index_of(entry), false});
  if (learns_ || forward == plans_.end()) return;
  plan_.insert(plan_.end(), forward->second.begin(), forward->second.end());
}

bool Prefetch::may_have_been_needed(const ParamGroup& group) const {
  const Index index = index_of(&group);
  return index == kNothing || states_[static_cast<size_t>(index)].was_needed;
}

void Prefetch::claim(Index index) {
  State& state = state_of(index);
  if (pass_ == Pass::kForward && key_.second) state.was_used = true;
  if (state.claims > 0) return;
  if (learns_) {
    agree(index);
  } else {
    gather_up_to(index);
  }
}

void Prefetch::need_later(ParamGroup& group) {
  const Index index = index_of(&group);
  if (index == kNothing) return;
  state_of(index).was_needed = true;
  if (pass_ != Pass::kNone) return claim(index);
  if (!group.has_unsharded()) group.unshard();
  state_of(index).is_kept = true;
}

void Prefetch::need(ParamGroup& group) {
  const Index index = index_of(&group);
  if (index == kNothing) return;
  need_later(group);
  State& state = state_of(index);
  state.claims = std::max<int64_t>(state.claims - 1, 0);
  // It is kept, and backward comes back to it as often: the first time must not take its memory.
  if (pass_ == Pass::kForward && key_.second && ++state.uses > 1 && !reshards(index))
    state.is_held = true;
  TORCH_CHECK(group.has_unsharded(),
              error_text("fully_shard",
                         "unit '" + group.label() + "' is needed in a " +
                             (pass_ == Pass::kForward ? "forward" : "backward") +
                             " after its place in the order of gathers, which the first forward "
                             "has set",
                         communicator_->rank_of(),
                         "Call set_dynamic_gather(True) on the model if units are used in varying "
                         "order, or keep this one unsharded (set_reshard_after_forward(False))."));
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
  // What is kept is not gathered again where it comes again.
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

// Tells the others what this rank needs, and gathers what any rank does. Returns whether any rank
// still needs something.
bool Prefetch::agree(Index wanted) {
  // Exchanges numbers on the CPU where that may be, whose waits watch the other ranks.
  const auto options = at::TensorOptions().dtype(at::kLong).device(communicator_->device());
  const at::Tensor all = at::empty({communicator_->world()}, options);
  const at::Tensor own = at::full({1}, wanted, options);
  communicator_->all_gather({all}, {own}, "units that ranks need").wait();
  const at::Tensor host = all.cpu();
  const int64_t* begin = host.const_data_ptr<int64_t>();
  std::set<Index> needed(begin, begin + host.numel());
  needed.erase(kNothing);
  for (const Index index : needed) {
    plan_.push_back(index);
    gather_next();
    if (wanted == kNothing) leave(index, /*is_last=*/false);
  }
  return !needed.empty();
}

void Prefetch::gather_next() {
  const Index index = plan_[next_++];
  ++state_of(index).claims;
  gather(index);
}

void Prefetch::gather(Index index) {
  State& state = state_of(index);
  if (state.is_kept) return;
  groups_[static_cast<size_t>(index)]->unshard();
  state.is_kept = !reshards(index);
}

void Prefetch::gather_up_to(Index index) {
  const auto ahead = std::find(plan_.begin() + static_cast<int64_t>(next_), plan_.end(), index);
  if (ahead == plan_.end()) return;  // it may still be there
  for (const auto end = static_cast<size_t>(ahead - plan_.begin()) + 1; next_ < end;) {
    gather_next();
    const Index gathered = plan_[next_ - 1];
    if (gathered != index) drop_unused(gathered);
  }
}

// What no forward of this rank has used its backward does not need.
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
  for (const Index one : state.ahead[which])
    if (state_of(one).claims == 0) gather_up_to(one);
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

// This rank does not need the unit in this pass any more. What it is for all ranks stays as it is
// until the pass is over for them, too.
void Prefetch::leave(Index index, bool is_last) {
  State& state = state_of(index);
  if (state.is_kept || !reshards(index)) return;
  if (pass_ == Pass::kBackward) state.is_held = false;
  if (state.is_held) return;
  state.claims = 0;
  ParamGroup& group = *groups_[static_cast<size_t>(index)];
  if (is_last && !learns_ && !comes_again(index)) group.memory().forget_pieces();
  group.reshard();
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
  if (pass_ == Pass::kForward && learns_) plans_[key_] = plan_;
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
  forget_pieces();  // before they are copied
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
  for (const ParamGroup* one : ahead)
    if (const Index other = index_of(one); other != kNothing) state.ahead[which].push_back(other);
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
