#include <trireme/strategies/fsdp/sharded_module.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/comm/subgroups.h>
#include <trireme/common/error.h>
#include <trireme/grad/write_gate.h>
#include <trireme/module/module_parameters.h>
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

struct Checked {
  const std::string& name;
  const at::Tensor& parameter;
  bool sparse_gradient;
};

void check_parameter(const Checked& checked, c10::Device device, RankOf where) {
  const auto& [name, parameter, sparse_gradient] = checked;
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
  TORCH_CHECK_VALUE(parameter.device() == device,
                    error_text(kArea,
                               "got '" + name + "' on " + parameter.device().str() +
                                   ", expected it on " + device.str() + ", where others are",
                               where, "Move the module before fully_shard."));
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
    if (const auto alive = root.lock()) alive->begin_writing();
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
  const std::vector<at::Tensor> parameters = inner_->parameters();
  if (!parameters.empty() && !parameters.front().is_meta()) device_ = parameters.front().device();
  settle_sharing();
  settle_resharding();
  std::vector<ShardedParamSpec> specs;
  collect(specs);
  TORCH_CHECK_VALUE(!leaves_.empty() || !units_below(*inner_).empty(),
                    error_text(kArea, "got " + inner_->name() + ", which has no parameters", where,
                               "Shard a module that has some."));
  if (!specs.empty()) {
    ParamGroupRequest request{std::move(specs), sharers_};
    request.device = device_;
    if (ParamGroup::gathers_over(*sharers_, request.device)) {
      request.gathers_with = options_.gathers_with ? options_.gathers_with : twin_of(*sharers_);
      request.reshards_with = options_.reshards_with;
    }
    settle_offload(request);
    group_ = make_param_group(std::move(request));
  }
  shard();
  Module::train(inner_->is_training());
}

ShardedModule::~ShardedModule() = default;

// Finds out who shares the parameters, and who has the same shards.
void ShardedModule::settle_sharing() {
  Communicator& all = *options_.communicator;
  const int64_t among = options_.shard_among;
  if (among == 0 || among == all.world()) {
    sharers_ = options_.communicator;
    return;
  }
  sharers_ = neighbours_of(all, among);
  replicates_with_ = counterparts_of(all, among);
  TORCH_CHECK_NOT_IMPLEMENTED(
      sharers_, error_text(kArea, "got a communicator that cannot make one of some of its ranks",
                           all.rank_of(), "Leave FsdpOptions::shard_among out."));
}

// Says by reshard_after_forward whether, and by reshards_with among whom if not all.
void ShardedModule::settle_resharding() {
  const RankOf where = sharers_->rank_of();
  const int64_t among = options_.reshard_among;
  const bool fits = among >= 0 && (among == 0 || where.world % among == 0);
  TORCH_CHECK_VALUE(fits, error_text(kArea, "got reshard_among=" + std::to_string(among), where,
                                     "Pass a factor of " + std::to_string(where.world) + "."));
  const bool is_said_once = among == 0 ? !options_.reshards_with : !options_.reshard_after_forward;
  const bool are_as_many = !options_.reshards_with || options_.reshards_with->world() == among;
  TORCH_CHECK_VALUE(is_said_once && are_as_many,
                    error_text(kArea, "got options of resharding that contradict each other", where,
                               "Pass reshard_after_forward, or reshard_among with, if at all, a "
                               "reshards_with of so many ranks."));
  if (among > 0) options_.reshard_after_forward = among > 1;
  if (among <= 1 || among == where.world) {
    options_.reshards_with = nullptr;
  } else if (!options_.reshards_with && ParamGroup::gathers_over(*sharers_, device_)) {
    options_.reshards_with = neighbours_of(*sharers_, among);
    TORCH_CHECK_NOT_IMPLEMENTED(
        options_.reshards_with,
        error_text(kArea, "got a communicator that cannot make one of some of its ranks", where,
                   "Pass FsdpOptions::reshards_with, or leave reshard_among out."));
  }
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
    check_parameter({all.names[i], parameter, all.sparse_gradient[i]}, device_,
                    options_.communicator->rank_of());
    ShardedParamSpec spec;
    spec.name = all.names[i];
    spec.sizes = parameter.sizes().vec();
    spec.dtype = parameter.scalar_type();
    spec.requires_grad = parameter.requires_grad();
    spec.dim = shard_dim(spec.name, parameter);
    if (parameter.is_floating_point()) {
      spec.param_dtype = options_.param_dtype;
      spec.reduce_dtype = options_.reduce_dtype;
    }
    specs.push_back(std::move(spec));
    leaves_.push_back(parameter);
  }
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
  if (root_) root_->begin_writing();
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
    settle_shard(group_->params()[i], group_->params()[i].spec().name,
                 options_.communicator->rank_of());
}

void ShardedModule::pretty_print(std::ostream& stream) const { inner_->pretty_print(stream); }

bool ShardedModule::is_serializable() const { return inner_->is_serializable(); }

}  // namespace trireme
