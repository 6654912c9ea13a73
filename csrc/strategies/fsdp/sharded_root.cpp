#include <trireme/strategies/fsdp/sharded_root.h>

#include <trireme/comm/subgroups.h>
#include <trireme/strategies/fsdp/sharded_join.h>

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace trireme {
namespace {

std::string sizes_text(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i)
    text += (i == 0 ? std::string() : std::string(", ")) + std::to_string(sizes[i]);
  return text + ")";
}

}  // namespace

std::vector<ShardedModule*> units_below(const torch::nn::Module& module) {
  std::vector<ShardedModule*> units;
  std::unordered_set<const ShardedModule*> seen;
  for (const auto& one : module.modules(/*include_self=*/false))
    if (auto* unit = dynamic_cast<ShardedModule*>(one.get()))
      if (seen.insert(unit).second) units.push_back(unit);
  return units;
}

void copy_back(const ShardedParam& param, const std::string& name, RankOf where) {
  if (param.lies_in_store()) return;
  const at::Tensor given = param.sharded().detach().clone();
  param.return_to_store();
  const ShardedParamSpec& spec = param.spec();
  const bool is_whole = given.sizes() == at::IntArrayRef(spec.sizes);
  TORCH_CHECK_VALUE(
      given.scalar_type() == spec.dtype && (is_whole || given.sizes() == param.sharded().sizes()),
      error_text("fully_shard",
                 "got '" + name + "' as " + c10::toString(given.scalar_type()) + " of shape " +
                     sizes_text(given.sizes()) + ", expected " + c10::toString(spec.dtype) +
                     " of shape " + sizes_text(spec.sizes) + " or this rank's part of it",
                 where, "Load what the same model has saved, and keep shapes and dtypes."));
  is_whole ? param.write_whole(given) : param.write_shard(given);
}

ShardedModule::Root::Root(const ShardedModule& unit) : outermost(&unit) {
  std::vector<const ShardedModule*> all{&unit};
  for (const ShardedModule* one : units_below(unit)) all.push_back(one);
  const auto& communicator = unit.options_.communicator;
  ranks.push_back({communicator, unit.replicates_with_, unit.options_.scatters_with});
  sharers_.push_back(unit.sharers_);
  std::unordered_map<const at::TensorImpl*, std::string> name_of;
  for (const auto& item : unit.named_parameters())
    name_of.emplace(item.value().unsafeGetTensorImpl(), item.key());
  for (const ShardedModule* one : all) {
    TORCH_CHECK(!one->root_,
                error_text("fully_shard",
                           "got a first forward of " + unit.name() + " after one of " +
                               one->name() + " in it, expected the outermost unit first",
                           communicator->rank_of(), "Run the outermost unit before its parts."));
    const std::optional<Compression>& inner = one->options_.compression;
    TORCH_CHECK_VALUE(!inner || inner == unit.options_.compression,
                      error_text("fully_shard",
                                 "got compression " + to_string(*inner) + " of a unit inside of " +
                                     unit.name() + ", which has another one",
                                 communicator->rank_of(),
                                 "Give it to the outermost unit, and inner units none."));
    if (!one->group_) continue;
    ranks_of.push_back(place_of(*one));
    const bool stays = one == &unit && one->group_->gathers();
    one->group_->flags().reshard_after_forward =
        one->options_.reshard_after_forward.value_or(!stays);
    units.push_back(one);
    groups.push_back(one->group_);
    for (const ShardedParam& param : one->group_->params())
      names.push_back(name_of.at(param.sharded().unsafeGetTensorImpl()));
  }
  core = Fsdp::make({groups, names, ranks, ranks_of, order_agreement(), unit.options_.compression});
  core->keep_gradients();
}

ShardedModule::Root::~Root() = default;

ShardedModule::Joining& ShardedModule::Root::joinable(ShardedModule& unit) {
  TORCH_CHECK_VALUE(&unit == outermost && ranks.size() == 1,
                    error_text("fully_shard",
                               "got a join of " + unit.name() +
                                   (&unit == outermost ? ", whose units have several sets of ranks"
                                                       : ", a unit in another"),
                               core->communicator()->rank_of(),
                               "Join the outermost unit, and give all units the same ranks."));
  if (!joining_) joining_ = std::make_unique<Joining>(unit, *this);
  return *joining_;
}

ShardedModule::Joining* ShardedModule::Root::joining() const {
  return joining_ && joining_->is_in_join() ? joining_.get() : nullptr;
}

void ShardedModule::Root::refuse_in_join(const std::string& call) const {
  TORCH_CHECK_VALUE(
      joining() == nullptr,
      error_text("fully_shard",
                 "got " + call +
                     " in a join, where ranks without inputs do not "
                     "follow it",
                 core->communicator()->rank_of(), "Call it before or behind join()."));
}

// Returns the index in `ranks` of those that share a unit; adds them if they are missing.
size_t ShardedModule::Root::place_of(const ShardedModule& unit) {
  const Communicator& all = *ranks.front().communicator;
  const Communicator& own = *unit.options_.communicator;
  TORCH_CHECK_VALUE(own.world() <= all.world() && unit.device_ == outermost->device_,
                    error_text("fully_shard",
                               "got " + unit.name() + " of " + std::to_string(own.world()) +
                                   " ranks on " + unit.device_.str() + " inside a unit of " +
                                   std::to_string(all.world()) + " on " + outermost->device_.str(),
                               all.rank_of(),
                               "Give inner units a communicator of some of its ranks, on its "
                               "device."));
  for (size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i].communicator.get() == &own && sharers_[i] == unit.sharers_) return i;
  ranks.push_back({unit.options_.communicator, unit.replicates_with_, unit.options_.scatters_with});
  sharers_.push_back(unit.sharers_);
  return ranks.size() - 1;
}

// Returns the communicator by which all ranks agree on the order of gathers; null where that of the
// units will do.
std::shared_ptr<Communicator> ShardedModule::Root::order_agreement() const {
  const bool gathers =
      std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group->gathers(); });
  if (ranks.size() < 2 || !gathers) return nullptr;
  Communicator& all = *ranks.front().communicator;
  std::shared_ptr<Communicator> twin = duplicate(all);
  TORCH_CHECK_NOT_IMPLEMENTED(
      twin, error_text("fully_shard",
                       "got units that fewer ranks share than the outermost one, and a "
                       "communicator that cannot make another one of its ranks",
                       all.rank_of(), "Give all units one communicator and shard_among."));
  return twin;
}

void ShardedModule::Root::copy_back_shards() {
  check_members();
  if (!core->is_writing()) return check_writes();
  size_t index = 0;
  for (const auto& group : groups)
    for (const ShardedParam& param : group->params())
      copy_back(param, names[index++], core->communicator()->rank_of());
  sample_shards();
}

void ShardedModule::Root::begin_reading() {
  copy_back_shards();
  core->begin_reading();
  note_members();
}

void ShardedModule::Root::begin_writing() {
  if (core->is_writing()) return;  // asked for each parameter
  check_members();
  check_writes();
  // The core counts a write of all members, and then may refuse the step.
  const auto noted = c10::make_scope_exit([this] { note_members(); });
  core->begin_writing();
}

void ShardedModule::Root::sample_shards() {
  size_t index = 0;
  for (const auto& group : groups)
    for (const ShardedParam& param : group->params())
      samples_.read(index++, SampledMemory::of(param.sharded()));
}

void ShardedModule::Root::check_writes() {
  size_t index = 0;
  for (const auto& group : groups) {
    for (const ShardedParam& param : group->params()) {
      const std::string& name = names[index];
      if (!samples_.is_changed(index++, SampledMemory::of(param.sharded()))) continue;
      sample_shards();  // said once
      TORCH_CHECK(false,
                  error_text("fully_shard",
                             "parameter '" + name +
                                 "' was written after a forward, when other ranks of the host may "
                                 "be reading it",
                             core->communicator()->rank_of(),
                             "Step with trireme::step(optimizer), and write it between "
                             "begin_writing() and the next forward."));
    }
  }
}

void ShardedModule::Root::note_members() {
  member_versions_.clear();
  for (const auto& group : groups)
    for (const at::Tensor& leaf : group->leaves())
      member_versions_.push_back(leaf.is_inference() ? 0 : leaf._version());
}

void ShardedModule::Root::check_members() {
  size_t index = 0;
  for (const auto& group : groups) {
    for (size_t i = 0; i < group->leaves().size(); ++i, ++index) {
      const at::Tensor& leaf = group->leaves()[i];
      const at::Tensor& unsharded = group->params()[i].unsharded();
      // Compares no addresses: there may be no memory now.
      const bool is_in_place =
          leaf.is_alias_of(unsharded) && leaf.storage_offset() == unsharded.storage_offset();
      const int64_t version = leaf.is_inference() ? 0 : leaf._version();
      if (is_in_place && (member_versions_.empty() || version == member_versions_[index])) continue;
      if (is_in_place) note_members();  // said once
      TORCH_CHECK(false, error_text("fully_shard",
                                    "the module's own '" + names[index] +
                                        "', which all ranks read, was written or replaced",
                                    core->communicator()->rank_of(),
                                    "Write model->named_parameters(), which are this rank's "
                                    "shards, and convert the module before fully_shard."));
    }
  }
}

}  // namespace trireme
