#include <trireme/strategies/fsdp/sharded_module.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/comm/subgroups.h>
#include <trireme/common/error.h>
#include <trireme/grad/codes/senders.h>
#include <trireme/memory/snapshot.h>
#include <trireme/module/averages_gradients.h>
#include <trireme/module/module_parameters.h>
#include <trireme/optim/write_gate.h>
#include <trireme/strategies/fsdp/module_mirror.h>
#include <trireme/strategies/fsdp/sharded_join.h>
#include <trireme/strategies/fsdp/sharded_root.h>
#include <trireme/strategies/fsdp/unit_ranks.h>

#include <ATen/ATen.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <ostream>
#include <unordered_set>
#include <utility>

// See [Note: a sharded C++ module] in sharded_module.h.

namespace trireme {
namespace {

constexpr const char* kArea = "fully_shard";

using Impl = const at::TensorImpl*;
Impl impl_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

// The module always shows the unsharded leaves.
class ShardsFace final : public ModuleFace {
 public:
  explicit ShardsFace(std::vector<at::Tensor> shards) : shards_(std::move(shards)) {}
  void show(bool /*unsharded*/) const override {}
  bool requires_grad(size_t parameter) const override { return shards_[parameter].requires_grad(); }

 private:
  std::vector<at::Tensor> shards_;
};

void check_parameter(const std::string& name, const at::Tensor& parameter, c10::Device device,
                     RankOf where) {
  TORCH_CHECK_VALUE(gate_of(parameter) == nullptr,
                    error_text(kArea, "got '" + name + "', which is sharded already", where,
                               "Share it inside one unit, and shard it once."));
  TORCH_CHECK_VALUE(parameter.layout() == at::kStrided,
                    error_text(kArea, "got '" + name + "' of a sparse layout, expected dense ones",
                               where, "Make it dense."));
  TORCH_CHECK_VALUE(parameter.device() == device,
                    error_text(kArea,
                               "got '" + name + "' on " + parameter.device().str() +
                                   ", expected it on " + device.str() + ", where others are",
                               where, "Move the module before fully_shard."));
}

// Returns the gradients of the part that lies like `like`, which is added if there is none.
std::vector<at::Tensor>& part_of(std::vector<GradNormPart>& parts, const GradNormPart& like) {
  const auto found = std::find_if(parts.begin(), parts.end(), [&like](const GradNormPart& part) {
    return part.sharded_over == like.sharded_over && part.copies == like.copies;
  });
  if (found != parts.end()) return found->gradients;
  parts.push_back(like);
  return parts.back().gradients;
}

}  // namespace

class ShardedModule::Gate final : public WriteGate {
 public:
  Gate(RankOf where, RankOf sharing, const std::vector<at::Tensor>& leaves)
      : where_(where), sharing_(sharing) {
    for (const at::Tensor& leaf : leaves) leaves_.insert(impl_of(leaf));
  }
  void before_write(const at::Tensor& parameter) override {
    TORCH_CHECK(leaves_.count(impl_of(parameter)) == 0,
                error_text(kArea,
                           "got an optimizer of parameters as they were before fully_shard, which "
                           "trains nothing",
                           where_,
                           "Make it of model->parameters(), model being what fully_shard "
                           "returned."));
    const auto alive = root.lock();
    if (!alive) return;
    if (Joining* joining = alive->joining()) joining->before_step(parameter);
    alive->begin_writing();
  }
  std::string held_part() const override {
    if (sharing_.world == 1) return {};
    return "rank " + std::to_string(sharing_.rank) + " of " + std::to_string(sharing_.world);
  }
  std::weak_ptr<Root> root;

 private:
  RankOf where_;
  RankOf sharing_;
  std::unordered_set<Impl> leaves_;
};

ShardedModule::ShardedModule(std::shared_ptr<torch::nn::Module> inner, FsdpOptions options)
    : Module(inner->name()), inner_(std::move(inner)), options_(std::move(options)) {
  if (!options_.communicator) options_.communicator = current_communicator();
  const RankOf where = options_.communicator->rank_of();
  TORCH_CHECK_VALUE(dynamic_cast<ShardedModule*>(inner_.get()) == nullptr,
                    error_text(kArea, "got " + inner_->name() + ", which is sharded already", where,
                               "Call fully_shard once per module, inner modules first."));
  const auto averaging = averaging_module_in(*inner_);
  TORCH_CHECK_VALUE(!averaging,
                    error_text(kArea,
                               "got a DistributedDataParallel at '" + averaging.value_or("") +
                                   "', which averages gradients, too",
                               where, "Shard the module in it."));
  const std::vector<at::Tensor> parameters = inner_->parameters();
  if (!parameters.empty() && !parameters.front().is_meta()) device_ = parameters.front().device();
  const UnitRanks ranks = ranks_of_unit(options_, device_);
  sharers_ = ranks.sharers;
  replicates_with_ = ranks.replicates_with;
  check_compression();
  std::vector<ShardedParamSpec> specs;
  collect(specs);
  TORCH_CHECK_VALUE(!leaves_.empty() || !units_below(*inner_).empty(),
                    error_text(kArea, "got " + inner_->name() + ", which has no parameters", where,
                               "Shard a module that has some."));
  if (!specs.empty()) {
    ParamGroupRequest request{std::move(specs), sharers_};
    request.device = device_;
    if (ParamGroup::gathers_over(*sharers_, request.device)) {
      request.gathers_with = options_.gathers_with ? options_.gathers_with : duplicate(*sharers_);
      request.reshards_with = ranks.reshards_with;
    }
    if (options_.offload) place_offloaded(*options_.offload, request, where);
    group_ = make_param_group(std::move(request));
  }
  shard();
  Module::train(inner_->is_training());
}

ShardedModule::~ShardedModule() = default;

// Compares what ranks were given.
void ShardedModule::check_compression() const {
  const RankOf where = options_.communicator->rank_of();
  if (options_.compression) check(*options_.compression);
  check_same_compression(*options_.communicator, options_.compression);
  TORCH_CHECK_VALUE(
      !options_.compression || !options_.scatters_with || replicates_with_,
      error_text(kArea, "got scatters_with beside compression, which needs no scatter", where,
                 "Leave one of them out."));
}

// Collects the parameters of inner that no unit in it has.
void ShardedModule::collect(std::vector<ShardedParamSpec>& specs) {
  std::unordered_set<Impl> shards;
  for (const ShardedModule* unit : units_below(*inner_))
    for (const at::Tensor& shard : unit->parameters()) shards.insert(impl_of(shard));
  const NamedParameters all = trireme::named_parameters(*inner_);
  for (size_t i = 0; i < all.names.size(); ++i) {
    const at::Tensor& parameter = all.tensors[i];
    if (shards.count(impl_of(parameter)) > 0) continue;
    check_parameter(all.names[i], parameter, device_, options_.communicator->rank_of());
    ShardedParamSpec spec;
    spec.name = all.names[i];
    spec.sizes = parameter.sizes().vec();
    spec.dtype = parameter.scalar_type();
    spec.requires_grad = parameter.requires_grad();
    spec.dim = shard_dim(spec.name, parameter);
    if (parameter.is_floating_point()) {
      spec.param_dtype = options_.param_dtype;
      spec.reduce_dtype = options_.reduce_dtype;
      spec.grad_dtype = gradient_dtype(spec.name, parameter);
    }
    specs.push_back(std::move(spec));
    leaves_.push_back(parameter);
  }
}

// Returns the dtype that the user has set for the gradient, if any.
std::optional<at::ScalarType> ShardedModule::gradient_dtype(const std::string& name,
                                                            const at::Tensor& parameter) const {
  const std::optional<at::ScalarType> dtype = parameter.grad_dtype();
  TORCH_CHECK_VALUE(dtype,
                    error_text(kArea,
                               "got '" + name +
                                   "', whose gradient may have any dtype, "
                                   "expected one that it has on all ranks",
                               options_.communicator->rank_of(), "Set one with set_grad_dtype()."));
  return *dtype == parameter.scalar_type() ? std::nullopt : dtype;
}

// Returns the dimension that FsdpOptions::shard_dim chooses.
int64_t ShardedModule::shard_dim(const std::string& name, const at::Tensor& parameter) const {
  if (!options_.shard_dim || parameter.dim() == 0) return 0;
  const int64_t given = options_.shard_dim(name, parameter);
  const int64_t dim = given < 0 ? given + parameter.dim() : given;
  TORCH_CHECK_VALUE(dim >= 0 && dim < parameter.dim(),
                    error_text(kArea,
                               "got dimension " + std::to_string(given) + " for '" + name +
                                   "', which has " + std::to_string(parameter.dim()),
                               options_.communicator->rank_of(), "Choose one of its dimensions."));
  return dim;
}

// Writes this rank's shards, gives the parameters the host's memory, and shows the shards.
void ShardedModule::shard() {
  Replacements shards;
  std::vector<at::Tensor> gated = leaves_;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const ShardedParam& param = group_->params()[i];
    at::Tensor& leaf = leaves_[i];
    param.write_whole(leaf.detach());
    leaf.mutable_grad().reset();
    leaf.set_data(param.unsharded());
    at::Tensor shard = param.sharded();
    if (leaf.requires_grad()) shard.set_requires_grad(true);
    gated.push_back(shard);
    shards.emplace(impl_of(leaf), std::move(shard));
  }
  fill_mirror(*this, *inner_, shards);
  gate_ = std::make_shared<Gate>(options_.communicator->rank_of(), sharing(), leaves_);
  put_gate(gated, gate_);
  if (!group_) return;
  hold_ = std::make_shared<UnitHold>(group_);
  put_deferred_sync(gated, hold_);
  gated.erase(gated.begin(), gated.begin() + static_cast<int64_t>(leaves_.size()));
  group_->set_face(std::make_shared<ShardsFace>(std::move(gated)), leaves_);
}

ShardedModule::Root& ShardedModule::own_root() const {
  const std::lock_guard lock(making_root_);
  if (root_) return *root_;
  const auto made = std::make_shared<Root>(*this);
  root_ = made;
  gate_->root = made;
  for (const ShardedModule* unit : units_below(*this)) {
    unit->root_ = made;
    unit->gate_->root = made;
  }
  return *root_;
}

void ShardedModule::enter(const std::vector<at::Tensor>& inputs) {
  Root& root = own_root();
  const bool is_outermost = root.outermost == this;
  root.core->begin_pass(is_outermost);
  const bool begins = root.core->is_writing();
  if (is_outermost || begins) root.copy_back_shards();
  root.core->pre_forward({group_, is_outermost}, inputs);
  if (begins) root.note_members();
}

void ShardedModule::leave(const std::vector<at::Tensor>& outputs, bool all_found) {
  root_->core->post_forward({group_, root_->outermost == this}, outputs, all_found);
}

void ShardedModule::abandon(const std::string& reason) noexcept {
  if (root_)
    root_->core->abandon_forward({group_, root_->outermost == this},
                                 reason.substr(0, reason.find('\n')));
}

std::optional<at::ScalarType> ShardedModule::input_dtype() const {
  return options_.cast_forward_inputs ? options_.param_dtype : std::nullopt;
}

void ShardedModule::begin_writing() {
  if (!root_) return;
  root_->refuse_in_join("begin_writing()");
  keep_all_snapshots();
  root_->begin_writing();
}

// Returns the groups of this unit and those in it.
std::vector<std::shared_ptr<ParamGroup>> ShardedModule::groups_within() const {
  std::vector<std::shared_ptr<ParamGroup>> groups;
  if (group_) groups.push_back(group_);
  for (const ShardedModule* unit : units_below(*this))
    if (unit->group_) groups.push_back(unit->group_);
  return groups;
}

void ShardedModule::unshard() {
  Root& root = own_root();
  root.refuse_in_join("unshard()");
  root.begin_reading();
  for (const auto& group : groups_within()) root.core->unshard(*group);
}

void ShardedModule::begin_unshard() {
  Root& root = own_root();
  root.refuse_in_join("unshard()");
  root.begin_reading();
  for (const auto& group : groups_within()) root.core->begin_unshard(*group);
}

void ShardedModule::reshard() {
  if (!root_) return;
  for (const auto& group : groups_within()) root_->core->reshard(*group);
}

void ShardedModule::set_reshard_after_forward(bool reshard) {
  std::vector<ShardedModule*> units = units_below(*this);
  units.push_back(this);
  for (ShardedModule* unit : units) {
    if (!unit->group_) continue;
    if (unit->group_->reshards_with()) unit->group_->reshard_to_all();
    unit->options_.reshard_after_forward = reshard;
    unit->group_->flags().reshard_after_forward = reshard;
  }
}

void ShardedModule::set_reshard_after_backward(bool reshard) {
  for (const auto& group : groups_within()) group->flags().reshard_after_backward = reshard;
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

ShardedModule::NoSync::NoSync(const ShardedModule& module) {
  for (const std::shared_ptr<ParamGroup>& group : module.groups_within()) {
    before_.emplace_back(group, group->flags().synchronizes);
    group->flags().synchronizes = false;
  }
}

ShardedModule::NoSync::~NoSync() {
  for (const auto& [group, synchronizes] : before_) group->flags().synchronizes = synchronizes;
}

void ShardedModule::set_requires_all_reduce(bool requires_all_reduce) {
  for (const auto& group : groups_within()) group->flags().all_reduces = requires_all_reduce;
}

void ShardedModule::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(factor > 0,
                    error_text("fully_shard", "got a divide factor of " + std::to_string(factor),
                               sharers_->rank_of(), "Pass one above 0."));
  if (group_) group_->flags().divide_factor = factor;
}

void ShardedModule::set_all_reduce_hook(AllReduceHook hook) {
  if (group_) group_->flags().all_reduce_hook = std::move(hook);
}

void ShardedModule::set_manual_backward_finalization(bool enabled) {
  own_root().core->set_manual_finalization(enabled);
}

void ShardedModule::finalize_backward() {
  own_root().refuse_in_join("finalize_backward()");
  own_root().core->finalize_backward();
}

Joinable& ShardedModule::joinable() { return own_root().joinable(*this); }

std::vector<GradNormPart> ShardedModule::gradients() const {
  if (root_) root_->refuse_in_join("gradients()");
  return parts_of_gradients();
}

std::vector<GradNormPart> ShardedModule::parts_of_gradients() const {
  std::vector<const ShardedModule*> units{this};
  for (const ShardedModule* unit : units_below(*this)) units.push_back(unit);
  std::vector<GradNormPart> parts;
  for (const ShardedModule* unit : units) {
    // Ranks that do not share this unit may have another one in its place (experts): all of them
    // count.
    GradNormPart cut{{}, device_, sharers_, 1};
    GradNormPart whole;
    if (unit->sharers_ != sharers_) {
      const auto& replicas = unit->replicates_with_;
      cut = {{}, device_, options_.communicator, replicas ? replicas->world() : 1};
      whole = {{}, device_, options_.communicator, unit->options_.communicator->world()};
    }
    part_of(parts, cut);  // the parts are the same on all ranks, whichever have gradients
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
  Joining* joining = root_ ? root_->joining() : nullptr;
  if (joining != nullptr) joining->before_clip(*this, {max_norm, norm_type, error_if_nonfinite});
  return trireme::clip_grad_norm_(parts_of_gradients(), {max_norm, norm_type, error_if_nonfinite});
}

std::vector<const ShardedParam*> ShardedModule::sharded_params() const {
  std::vector<const ShardedParam*> params;
  if (group_)
    for (const ShardedParam& param : group_->params()) params.push_back(&param);
  return params;
}

void ShardedModule::add_parts(HeldParts& parts) const {
  for (const ShardedParam* param : sharded_params()) {
    const ShardedParamSpec& spec = param->spec();
    if (spec.is_replicated()) continue;
    std::vector<int64_t> first(spec.sizes.size());
    first[static_cast<size_t>(spec.dim)] = ShardRows(spec, sharing()).first;
    parts[impl_of(param->sharded())] = {param->sharded(), spec.sizes, std::move(first)};
  }
}

std::vector<KeptCodes> ShardedModule::kept_codes() const {
  if (!root_ && !options_.compression) return {};
  return own_root().core->reducers().kept_codes();
}

StepReport ShardedModule::last_step() const {
  return root_ ? root_->core->reducers().last_step() : StepReport{};
}

void ShardedModule::reset_iter_state() {
  if (root_) root_->core->reset();
}

void ShardedModule::train(bool on) {
  Module::train(on);
  inner_->train(on);
}

void ShardedModule::check_unchanged(std::optional<torch::Device> device,
                                    std::optional<torch::Dtype> dtype) const {
  const RankOf where = options_.communicator->rank_of();
  const bool is_there =
      !device || *device == device_ || (device->type() == device_.type() && !device->has_index());
  TORCH_CHECK_NOT_IMPLEMENTED(is_there, error_text(kArea,
                                                   "got to(" + (device ? device->str() : "") +
                                                       ") of a sharded module on " + device_.str(),
                                                   where, "Move the module before fully_shard."));
  for (const at::Tensor& shard : parameters()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !dtype || !shard.is_floating_point() || shard.scalar_type() == *dtype,
        error_text(kArea,
                   std::string("got to(") + c10::toString(*dtype) + ") of a sharded module of " +
                       c10::toString(shard.scalar_type()),
                   where, "Call it before fully_shard, or set FsdpOptions::param_dtype."));
  }
}

void ShardedModule::to(torch::Device device, torch::Dtype dtype, bool /*non_blocking*/) {
  check_unchanged(device, dtype);
}
void ShardedModule::to(torch::Dtype dtype, bool /*non_blocking*/) { check_unchanged({}, dtype); }
void ShardedModule::to(torch::Device device, bool /*non_blocking*/) { check_unchanged(device, {}); }

std::shared_ptr<torch::nn::Module> ShardedModule::clone(
    const std::optional<torch::Device>& /*device*/) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, error_text(kArea, "got clone() of a sharded module", options_.communicator->rank_of(),
                        "Clone the module before fully_shard."));
}

void ShardedModule::save(torch::serialize::OutputArchive& archive) const {
  own_root().begin_reading();
  Replacements wholes;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const ShardedParam& param = group_->params()[i];
    if (!param.spec().is_cast() && !group_->gathers()) continue;
    wholes.emplace(impl_of(leaves_[i]),
                   param.along_dim(group_->memory().read_whole(static_cast<int64_t>(i))));
  }
  if (wholes.empty()) return inner_->save(archive);  // its own way, which may be any
  torch::nn::Module whole;
  fill_mirror(whole, *inner_, wholes);
  whole.save(archive);
}

void ShardedModule::load(torch::serialize::InputArchive& archive) {
  begin_writing();
  Module::load(archive);
  for (size_t i = 0; i < leaves_.size(); ++i)
    copy_back(group_->params()[i], group_->params()[i].spec().name,
              options_.communicator->rank_of());
}

void ShardedModule::pretty_print(std::ostream& stream) const { inner_->pretty_print(stream); }

bool ShardedModule::is_serializable() const { return inner_->is_serializable(); }

}  // namespace trireme
