#include <trireme/strategies/fsdp/sharded_module.h>

#include <trireme/comm/launch.h>
#include <trireme/comm/twin.h>
#include <trireme/common/error.h>
#include <trireme/grad/module_parameters.h>
#include <trireme/grad/write_gate.h>
#include <trireme/strategies/fsdp/module_mirror.h>
#include <trireme/strategies/fsdp/sharded_root.h>

#include <ATen/ATen.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

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

void check_parameter(const std::string& name, const at::Tensor& parameter, bool sparse_gradient,
                     RankOf where) {
  TORCH_CHECK_VALUE(gate_of(parameter) == nullptr,
                    error_text(kArea, "got '" + name + "', which is sharded already", where,
                               "Share it inside one unit, and shard it once."));
  TORCH_CHECK_VALUE(
      parameter.layout() == at::kStrided && !sparse_gradient,
      error_text(kArea,
                 "got '" + name +
                     (sparse_gradient ? "' with sparse gradients" : "' of a sparse layout") +
                     ", expected dense ones",
                 where, "Make it dense."));
  TORCH_CHECK_NOT_IMPLEMENTED(
      parameter.is_cpu(),
      error_text(kArea,
                 "got '" + name + "' on " + parameter.device().str() +
                     ", which ranks that share a host's memory have no use for",
                 where,
                 "It comes with the all-gather path; keep parameters on the CPU until then."));
}

}  // namespace

class ShardedModule::Gate final : public WriteGate {
 public:
  Gate(RankOf where, const std::vector<at::Tensor>& leaves) : where_(where) {
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
    if (const auto alive = root.lock()) alive->begin_writing();
  }
  std::weak_ptr<Root> root;

 private:
  RankOf where_;
  std::unordered_set<Impl> leaves_;
};

ShardedModule::ShardedModule(std::shared_ptr<torch::nn::Module> inner, FsdpOptions options)
    : Module(inner->name()), inner_(std::move(inner)), options_(std::move(options)) {
  if (!options_.communicator) options_.communicator = current_communicator();
  const RankOf where = options_.communicator->rank_of();
  TORCH_CHECK_VALUE(dynamic_cast<ShardedModule*>(inner_.get()) == nullptr,
                    error_text(kArea, "got " + inner_->name() + ", which is sharded already", where,
                               "Call fully_shard once per module, inner modules first."));
  std::vector<ShardedParamSpec> specs;
  collect(specs);
  TORCH_CHECK_VALUE(!leaves_.empty() || !units_below(*inner_).empty(),
                    error_text(kArea, "got " + inner_->name() + ", which has no parameters", where,
                               "Shard a module that has some."));
  if (!specs.empty()) {
    ParamGroupRequest request{std::move(specs), options_.communicator};
    if (ParamGroup::gathers_over(*options_.communicator, request.device))
      request.gathers_with =
          options_.gathers_with ? options_.gathers_with : twin_of(*options_.communicator);
    group_ = make_param_group(std::move(request));
  }
  shard();
  Module::train(inner_->is_training());
}

ShardedModule::~ShardedModule() = default;

// The parameters of inner that no unit in it has.
void ShardedModule::collect(std::vector<ShardedParamSpec>& specs) {
  std::unordered_set<Impl> shards;
  for (const ShardedModule* unit : units_below(*inner_))
    for (const at::Tensor& shard : unit->parameters()) shards.insert(impl_of(shard));
  const NamedParameters all = trireme::named_parameters(*inner_);
  for (size_t i = 0; i < all.names.size(); ++i) {
    const at::Tensor& parameter = all.tensors[i];
    if (shards.count(impl_of(parameter)) > 0) continue;
    check_parameter(all.names[i], parameter, all.sparse_gradient[i],
                    options_.communicator->rank_of());
    ShardedParamSpec spec;
    spec.name = all.names[i];
    spec.sizes = parameter.sizes().vec();
    spec.dtype = parameter.scalar_type();
    spec.requires_grad = parameter.requires_grad();
    if (parameter.is_floating_point()) {
      spec.param_dtype = options_.param_dtype;
      spec.reduce_dtype = options_.reduce_dtype;
    }
    specs.push_back(std::move(spec));
    leaves_.push_back(parameter);
  }
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
  gate_ = std::make_shared<Gate>(options_.communicator->rank_of(), leaves_);
  put_gate(gated, gate_);
  if (!group_) return;
  gated.erase(gated.begin(), gated.begin() + static_cast<int64_t>(leaves_.size()));
  group_->set_face(std::make_shared<ShardsFace>(std::move(gated)), leaves_);
}

ShardedModule::Root& ShardedModule::own_root() const {
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
  const bool begins = root.core->is_writing();
  if (is_outermost || begins) root.settle();
  root.core->pre_forward({group_, is_outermost}, inputs);
  if (begins) root.note_members();
}

void ShardedModule::leave(const std::vector<at::Tensor>& outputs) {
  root_->core->post_forward({group_, root_->outermost == this}, outputs, /*all_found=*/true);
}

void ShardedModule::abandon(const std::string& reason) noexcept {
  if (root_ && root_->outermost == this)
    root_->core->abandon_forward(reason.substr(0, reason.find('\n')));
}

std::optional<at::ScalarType> ShardedModule::input_dtype() const {
  return options_.cast_forward_inputs ? options_.param_dtype : std::nullopt;
}

// Of this unit and those in it.
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

void ShardedModule::reshard() {
  if (!root_) return;
  for (ParamGroup* group : groups_within()) root_->core->reshard(*group);
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

void ShardedModule::begin_writing() {
  if (root_) root_->begin_writing();
}

ShardedModule::NoSync::NoSync(ShardedModule& module)
    : module_(module), before_(module.synchronizes_) {
  module_.set_synchronize(false);
}

ShardedModule::NoSync::~NoSync() { module_.set_synchronize(before_); }

void ShardedModule::set_synchronize(bool synchronize) {
  std::vector<ShardedModule*> units = units_below(*this);
  units.push_back(this);
  for (ShardedModule* unit : units) {
    unit->synchronizes_ = synchronize;
    for (size_t i = 0; root_ && i < root_->groups.size(); ++i)
      if (root_->groups[i] == unit->group_) root_->synchronizes[i] = synchronize;
  }
  if (root_) root_->core->set_synchronize(root_->synchronizes);
}

std::vector<GradNormPart> ShardedModule::gradients() const {
  GradNormPart sharded{{}, c10::kCPU, options_.communicator};
  GradNormPart whole;
  std::unordered_set<Impl> seen;
  for (const at::Tensor& shard : parameters()) {
    if (!seen.insert(impl_of(shard)).second || !shard.grad().defined()) continue;
    (shard.dim() == 0 ? whole : sharded).gradients.push_back(shard.grad());
  }
  return {std::move(sharded), std::move(whole)};
}

at::Tensor ShardedModule::clip_grad_norm_(double max_norm, double norm_type,
                                          bool error_if_nonfinite) {
  return trireme::clip_grad_norm_(gradients(), {max_norm, norm_type, error_if_nonfinite});
}

StepReport ShardedModule::last_step() const {
  return root_ ? root_->core->reducer().last_step() : StepReport{};
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
  TORCH_CHECK_NOT_IMPLEMENTED(
      !device || device->is_cpu(),
      error_text(kArea, "got to(" + (device ? device->str() : "") + ")", where,
                 "It comes with the all-gather path; stay on the CPU."));
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
    settle_shard(group_->params()[i], group_->params()[i].spec().name,
                 options_.communicator->rank_of());
}

void ShardedModule::pretty_print(std::ostream& stream) const { inner_->pretty_print(stream); }

bool ShardedModule::is_serializable() const { return inner_->is_serializable(); }

}  // namespace trireme
