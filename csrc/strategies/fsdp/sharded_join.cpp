#include <trireme/strategies/fsdp/sharded_join.h>

#include <trireme/optim/write_gate.h>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace trireme {
namespace {

enum What : int64_t { kForward = 1, kBackward, kClip, kStep };

// Returns whether all of the units say so; throws ValueError if only some do.
bool all_or_none(int64_t count, size_t units, const char* what, RankOf where) {
  TORCH_CHECK_VALUE(
      count == 0 || count == static_cast<int64_t>(units),
      error_text("fully_shard", std::string("got ") + what + " of some units only in a join", where,
                 "Set it for all units."));
  return count > 0;
}

// Returns the units of a model, itself first.
std::vector<ShardedModule*> units_of(ShardedModule& model) {
  std::vector<ShardedModule*> units = units_below(model);
  units.insert(units.begin(), &model);
  return units;
}

}  // namespace

std::string ShardedModule::Joining::describe(const JoinCall& call) const {
  const std::string names[] = {
      "a forward", "a backward", "clip_grad_norm_(" + std::to_string(call.numbers[0]) + ")",
      "a step of optimizer " + std::to_string(static_cast<int64_t>(call.numbers[0]))};
  return names[call.what - kForward] + " of " + model_.name();
}

void ShardedModule::Joining::enter_join(Join* join, const JoinOptions& options) {
  join_ = join;
  optimizers_.clear();
  optimizer_of_.clear();
  root_.core->tell_passes(nullptr);
  if (join_ == nullptr) return;
  refuse_meetings(*model_.inner_, options, "fully_shard", join_communicator()->rank_of());
  std::unordered_set<const at::TensorImpl*> shards;
  for (const at::Tensor& shard : model_.parameters()) shards.insert(shard.unsafeGetTensorImpl());
  for (torch::optim::Optimizer* one : options.optimizers) {
    bool is_ours = false;
    for (const auto& group : one->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (!shards.contains(parameter.unsafeGetTensorImpl())) continue;
        const bool is_first = !std::exchange(is_ours, true);
        optimizer_of_[parameter.unsafeGetTensorImpl()] = {optimizers_.size(), is_first};
      }
    }
    if (is_ours) optimizers_.push_back(one);
  }
  TORCH_CHECK_VALUE(!optimizers_.empty(),
                    error_text("fully_shard", "got a join without the optimizer of the model",
                               join_communicator()->rank_of(),
                               "Pass it: model->join(optimizer, train), or "
                               "JoinOptions::optimizers."));
  root_.core->tell_passes([this](const Fsdp::PassStart& pass) { before_pass(pass); });
}

void ShardedModule::Joining::before_pass(const Fsdp::PassStart& pass) {
  if (join_->has_run_out()) return;
  const auto& groups = root_.groups;
  if (!pass.is_backward) {
    const auto entry = std::find(groups.begin(), groups.end(), pass.entry) - groups.begin();
    const bool trains = at::GradMode::is_enabled();
    join_->tell(*this, {kForward, 0, {static_cast<double>(entry), trains ? 1. : 0.}});
    return;
  }
  const auto count = [&](bool UnitFlags::* flag) {
    return std::count_if(groups.begin(), groups.end(),
                         [flag](const auto& group) { return group->flags().*flag; });
  };
  const RankOf where = join_communicator()->rank_of();
  const bool synchronizes =
      all_or_none(count(&UnitFlags::synchronizes), groups.size(), "no_sync()", where);
  const bool all_reduces = all_or_none(count(&UnitFlags::all_reduces), groups.size(),
                                       "set_requires_all_reduce(false)", where);
  join_->tell(*this, {kBackward, 0, {synchronizes ? 1. : 0., all_reduces ? 1. : 0.}});
}

void ShardedModule::Joining::before_clip(const ShardedModule& unit, const ClipOptions& options) {
  const std::vector<ShardedModule*> units = units_of(model_);
  const auto place = std::find(units.begin(), units.end(), &unit) - units.begin();
  join_->tell(*this, {kClip,
                      0,
                      {options.max_norm, options.norm_type, options.error_if_nonfinite ? 1. : 0.,
                       static_cast<double>(place)}});
}

// An optimizer asks for each parameter in turn: its step begins at the first one.
void ShardedModule::Joining::before_step(const at::Tensor& parameter) {
  const auto found = optimizer_of_.find(parameter.unsafeGetTensorImpl());
  TORCH_CHECK_VALUE(
      found != optimizer_of_.end(),
      error_text("fully_shard", "got a step of an optimizer that join() was not given",
                 join_communicator()->rank_of(), "Name it in JoinOptions::optimizers."));
  const auto& [optimizer, is_first] = found->second;
  if (!is_first) return;
  join_->tell(*this, {kStep, 0, {static_cast<double>(optimizer)}});
  join_->share_options({optimizers_[optimizer]});
}

// Clears the gradients with which this rank has stepped already.
void ShardedModule::Joining::run_out() {
  for (torch::optim::Optimizer* one : optimizers_) one->zero_grad();
}

void ShardedModule::Joining::follow(const JoinCall& call) {
  const auto number = [&](size_t i) { return static_cast<size_t>(call.numbers[i]); };
  switch (call.what) {
    case kForward: {
      const at::AutoGradMode grad_mode(call.numbers[1] != 0);
      const bool begins = root_.core->is_writing();
      const bool has_parameters = number(0) < root_.groups.size();
      root_.copy_back_shards();
      root_.core->shadow_forward(has_parameters ? root_.groups[number(0)] : nullptr);
      if (begins) root_.note_members();
      return;
    }
    case kBackward:
      return follow_backward(call.numbers[0] != 0, call.numbers[1] != 0);
    case kClip:
      units_of(model_)[number(3)]->clip_grad_norm_(call.numbers[0], call.numbers[1],
                                                   call.numbers[2] != 0);
      return;
    default:
      trireme::step(*optimizers_[number(0)]);
      optimizers_[number(0)]->zero_grad();
  }
}

void ShardedModule::Joining::follow_backward(bool synchronizes, bool all_reduces) {
  std::vector<UnitFlags> before;
  for (const auto& group : root_.groups) before.push_back(group->flags());
  const auto restore = c10::make_scope_exit([&] {
    for (size_t i = 0; i < before.size(); ++i) root_.groups[i]->flags() = before[i];
  });
  for (const auto& group : root_.groups) {
    group->flags().synchronizes = synchronizes;
    group->flags().all_reduces = all_reduces;
  }
  root_.core->shadow_backward();
}

}  // namespace trireme
