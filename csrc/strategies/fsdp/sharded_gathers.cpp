#include <trireme/strategies/fsdp/sharded_module.h>
#include <trireme/strategies/fsdp/sharded_root.h>

#include <utility>

// How the units of a sharded C++ module come to be whole, and for how long.

namespace trireme {

// Returns the groups of this unit and those in it.
std::vector<ParamGroup*> ShardedModule::groups_within() const {
  std::vector<ParamGroup*> groups;
  if (group_) groups.push_back(group_.get());
  for (const ShardedModule* unit : units_below(*this))
    if (unit->group_) groups.push_back(unit->group_.get());
  return groups;
}

void ShardedModule::unshard() {
  Root& root = own_root();
  root.begin_reading();
  for (ParamGroup* group : groups_within()) root.core->unshard(*group);
}

void ShardedModule::begin_unshard() {
  Root& root = own_root();
  root.begin_reading();
  for (ParamGroup* group : groups_within()) root.core->begin_unshard(*group);
}

void ShardedModule::reshard() {
  if (!root_) return;
  for (ParamGroup* group : groups_within()) root_->core->reshard(*group);
}

void ShardedModule::set_reshard_after_forward(bool reshard) {
  for (ShardedModule* unit : units()) {
    if (!unit->group_) continue;
    if (unit->group_->reshards_with()) unit->group_->reshard_to_all();
    unit->options_.reshard_after_forward = reshard;
    unit->group_->set_reshard_after_forward(reshard);
  }
}

void ShardedModule::set_reshard_after_backward(bool reshard) {
  for (ParamGroup* group : groups_within()) group->set_reshard_after_backward(reshard);
}

void ShardedModule::set_forward_prefetch(const std::vector<const ShardedModule*>& units) {
  std::vector<const ParamGroup*> ahead;
  for (const ShardedModule* unit : units) ahead.push_back(unit->group_.get());
  if (group_) own_root().core->prefetch().set_forward_prefetch(*group_, ahead);
}

void ShardedModule::set_backward_prefetch(const std::vector<const ShardedModule*>& units) {
  std::vector<const ParamGroup*> ahead;
  for (const ShardedModule* unit : units) ahead.push_back(unit->group_.get());
  if (group_) own_root().core->prefetch().set_backward_prefetch(*group_, ahead);
}

void ShardedModule::set_dynamic_gather(bool dynamic) {
  own_root().core->prefetch().set_dynamic(dynamic);
}

void ShardedModule::set_memory_sources(BufferPool::Source gathered,
                                       const BufferPool::Source& gradients) {
  own_root().core->set_memory_sources(std::move(gathered), gradients);
}

}  // namespace trireme
