#include <trireme/common/error.h>
#include <trireme/strategies/fsdp/sharded_module.h>
#include <trireme/strategies/fsdp/sharded_root.h>

#include <algorithm>
#include <utility>

// What a user says of the gradients of a sharded C++ module, and does with them.

namespace trireme {
namespace {

// The gradients of the part that lies like `like`, which is added if there is none.
std::vector<at::Tensor>& part_of(std::vector<GradNormPart>& parts, const GradNormPart& like) {
  const auto found = std::find_if(parts.begin(), parts.end(), [&like](const GradNormPart& part) {
    return part.sharded_over == like.sharded_over && part.copies == like.copies;
  });
  if (found != parts.end()) return found->gradients;
  parts.push_back(like);
  return parts.back().gradients;
}

}  // namespace

ShardedModule::NoSync::NoSync(ShardedModule& module)
    : module_(module), before_(module.flags_.synchronizes) {
  module_.set_synchronize(false);
}

ShardedModule::NoSync::~NoSync() { module_.set_synchronize(before_); }

// Returns this unit, and those in it.
std::vector<ShardedModule*> ShardedModule::units() {
  std::vector<ShardedModule*> units = units_below(*this);
  units.push_back(this);
  return units;
}

void ShardedModule::set_synchronize(bool synchronize) {
  for (ShardedModule* unit : units()) unit->flags_.synchronizes = synchronize;
  if (root_) root_->follow_flags();
}

void ShardedModule::set_requires_all_reduce(bool requires_all_reduce) {
  for (ShardedModule* unit : units()) unit->flags_.all_reduces = requires_all_reduce;
  if (root_) root_->follow_flags();
}

void ShardedModule::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(factor > 0,
                    error_text("fully_shard", "got a divide factor of " + std::to_string(factor),
                               sharers_->rank_of(), "Pass one above 0."));
  flags_.divide_factor = factor;
  if (root_) root_->follow_flags();
}

void ShardedModule::set_all_reduce_hook(AllReduceHook hook) {
  flags_.hook = std::move(hook);
  if (root_) root_->follow_flags();
}

void ShardedModule::set_manual_backward_finalization(bool enabled) {
  own_root().core->set_manual_finalization(enabled);
}

void ShardedModule::finalize_backward() { own_root().core->finalize_backward(); }

std::vector<GradNormPart> ShardedModule::gradients() const {
  std::vector<const ShardedModule*> units{this};
  for (const ShardedModule* unit : units_below(*this)) units.push_back(unit);
  std::vector<GradNormPart> parts;
  for (const ShardedModule* unit : units) {
    // What other ranks share than this unit may be another one there (experts): all of them count.
    GradNormPart cut{{}, device_, sharers_, 1};
    GradNormPart whole;
    if (unit->sharers_ != sharers_) {
      const auto& replicas = unit->replicates_with_;
      cut = {{}, device_, options_.communicator, replicas ? replicas->world() : 1};
      whole = {{}, device_, options_.communicator, unit->options_.communicator->world()};
    }
    part_of(parts, cut);  // whoever has gradients, the parts are the same on all ranks
    part_of(parts, whole);
    for (const ShardedParam* param : unit->sharded_params()) {
      const at::Tensor& grad = param->sharded().grad();
      if (grad.defined()) part_of(parts, grad.dim() == 0 ? whole : cut).push_back(grad);
    }
  }
  return parts;
}

at::Tensor ShardedModule::clip_grad_norm_(double max_norm, double norm_type,
                                          bool error_if_nonfinite) {
  return trireme::clip_grad_norm_(gradients(), {max_norm, norm_type, error_if_nonfinite});
}

}  // namespace trireme
