#include <trireme/strategies/zero/zero_optimizer.h>

#include <trireme/comm/run_together.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/memory/snapshot.h>
#include <trireme/module/averages_gradients.h>

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <exception>
#include <numeric>

namespace trireme {

using torch::optim::OptimizerParamGroup;

namespace {

// Names parameters by their places, where no module tells names.
NamedParameters by_place(const std::vector<at::Tensor>& parameters, size_t group) {
  NamedParameters named;
  for (const at::Tensor& parameter : parameters) {
    named.names.push_back("param_groups()[" + std::to_string(group) + "].params()[" +
                          std::to_string(named.names.size()) + "]");
    named.tensors.push_back(parameter);
    named.sparse_gradient.push_back(false);
  }
  return named;
}

}  // namespace

ZeroParameters::ZeroParameters(std::vector<at::Tensor> parameters)
    : ZeroParameters(std::vector<OptimizerParamGroup>{{std::move(parameters)}}) {}

ZeroParameters::ZeroParameters(const std::vector<OptimizerParamGroup>& param_groups)
    : groups(param_groups) {
  for (size_t g = 0; g < groups.size(); ++g) {
    NamedParameters of_group = by_place(groups[g].params(), g);
    for (size_t i = 0; i < of_group.names.size(); ++i) {
      named.names.push_back(std::move(of_group.names[i]));
      named.tensors.push_back(of_group.tensors[i]);
      named.sparse_gradient.push_back(false);
    }
  }
}

ZeroParameters::ZeroParameters(const torch::nn::Module& module)
    : named(named_parameters(module)), averaging_module(averaging_module_in(module)) {
  groups.emplace_back(named.tensors);
}

ZeroOptimizer::ZeroOptimizer(ZeroParameters parameters, Setup setup)
    : Optimizer(parameters.groups, std::move(setup.defaults)),
      communicator_(std::move(setup.communicator)),
      options_(setup.options),
      cores_(std::make_shared<ZeroCores>(communicator_, options_, [this] { drop_shards(); })),
      count_step_(std::move(setup.count_step)) {
  if (options_.fused_step && (options_.stage != 2 || count_step_ == nullptr)) {
    const std::string what = count_step_ == nullptr
                                 ? std::string("another optimizer")
                                 : std::string("stage ") + std::to_string(options_.stage);
    refuse("got fused_step for " + what + ", expected trireme::optim::Adam or AdamW and stage 2",
           "Change that, or leave fused_step out.");
  }
  if (options_.stage == 2 && parameters.averaging_module)
    refuse("got stage 2 for the module at '" + *parameters.averaging_module +
               "', which DistributedDataParallel averages already",
           "Use the plain module, or stage 1.");
  for (const OptimizerParamGroup& group : param_groups_)
    group_counts_.push_back(static_cast<int64_t>(group.params().size()));
  add(std::move(parameters.named), [&] {
    std::vector<OptimizerParamGroup> groups;
    for (size_t g = 0; g < param_groups_.size(); ++g) groups.push_back(local_group(g));
    local_ = setup.make_local(groups);
  });
}

ZeroOptimizer::~ZeroOptimizer() = default;

// Shards parameters, and makes what steps their shards.
void ZeroOptimizer::add(NamedParameters parameters, const std::function<void()>& make) {
  cores_->claim(parameters);
  try {
    cores_->shard(std::move(parameters));
    make_together(make);
  } catch (...) {
    cores_->undo();
    throw;
  }
  cores_->commit();
}

// Makes something on all ranks or on none: a rank that cannot raises its own error, the others one
// that names it.
void ZeroOptimizer::make_together(const std::function<void()>& make) {
  const c10::Device device = cores_->all().front()->parameters().front().device();
  const auto failed = run_together(make, *communicator_, device);
  if (!failed) return;
  if (failed->own) std::rethrow_exception(failed->own);
  refuse(
      "got an optimizer that rank " + std::to_string(failed->rank) + " cannot use: " + failed->text,
      "Pass what every rank can use for its part of the parameters.");
}

// Drops the shards, whose parameters another optimizer has.
void ZeroOptimizer::drop_shards() {
  for (OptimizerParamGroup& group : local_->param_groups()) group.params().clear();
  local_->state().clear();
}

// Returns a group's shards on this rank, with its options.
OptimizerParamGroup ZeroOptimizer::local_group(size_t group) const {
  const std::vector<ShardedParameter> all = cores_->sharded_parameters();
  const std::vector<at::Tensor> shards = cores_->shards();
  auto index = static_cast<size_t>(std::accumulate(
      group_counts_.begin(), group_counts_.begin() + static_cast<int64_t>(group), int64_t{0}));
  std::vector<at::Tensor> owned;
  for (int64_t i = 0; i < group_counts_[group]; ++i, ++index)
    if (all[index].is_owned_by(communicator_->rank())) owned.push_back(shards[index]);
  return {std::move(owned), param_groups_[group].options().clone()};
}

void ZeroOptimizer::add_param_group(const OptimizerParamGroup& param_group) {
  cores_->live();
  check_groups();
  Optimizer::add_param_group(param_group);
  const size_t group = group_counts_.size();
  group_counts_.push_back(static_cast<int64_t>(param_group.params().size()));
  try {
    add(by_place(param_group.params(), group),
        [&] { local_->add_param_group(local_group(group)); });
  } catch (...) {
    group_counts_.pop_back();
    param_groups_.pop_back();
    if (local_->param_groups().size() > group) local_->param_groups().pop_back();
    throw;
  }
}

// Torch's add_param_group() and add_parameters() are not virtual.
void ZeroOptimizer::check_groups() const {
  bool are_ours = param_groups_.size() == group_counts_.size();
  for (size_t g = 0; are_ours && g < group_counts_.size(); ++g)
    are_ours = static_cast<int64_t>(param_groups_[g].params().size()) == group_counts_[g];
  if (are_ours) return;
  refuse("got parameters that were added through torch::optim::Optimizer",
         "Call add_param_group() of the ZeroRedundancyOptimizer itself.");
}

at::Tensor ZeroOptimizer::step(LossClosure closure) {
  cores_->live();
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    or_abandon([&] { loss = closure(); });
  }
  check_groups();
  join_.before_step();
  cores_->begin_step();
  for (const torch::optim::OptimizerParamGroup& group : param_groups_)
    keep_snapshots_of(group.params());
  or_abandon([&] {
    for (size_t g = 0; g < param_groups_.size(); ++g)
      local_->param_groups()[g].set_options(param_groups_[g].options().clone());
    step_sums();
    local_->step();
  });
  cores_->end_step();
  return loss;
}

// Steps the shards whose gradients the last backward has left to be summed up (fused_step).
void ZeroOptimizer::step_sums() {
  size_t group = 0;
  size_t parameter = 0;  // index among all
  for (const auto& core : cores_->all()) {
    const size_t first = parameter;
    const size_t end = first + core->parameter_infos().size();
    std::vector<FusedAdamGroup> fused;
    for (; parameter < end; ++group) {
      FusedAdamGroup one;
      std::vector<at::Tensor> shards;
      for (int64_t i = 0; i < group_counts_[group]; ++i, ++parameter) {
        const bool is_summed = core->has_sums() && core->summed()[parameter - first];
        const at::Tensor& shard = core->shards()[parameter - first];
        if (!is_summed || shard.numel() == 0) continue;
        one.parameters.push_back(static_cast<int64_t>(parameter - first));
        shards.push_back(shard);
      }
      if (shards.empty()) continue;
      optim::AdamStates states = count_step_(*local_, group, shards);
      one.exp_avgs = std::move(states.exp_avgs);
      one.exp_avg_sqs = std::move(states.exp_avg_sqs);
      one.max_exp_avg_sqs = std::move(states.max_exp_avg_sqs);
      one.step_numbers = std::move(states.step_numbers);
      one.options = states.options;
      fused.push_back(std::move(one));
    }
    if (core->has_sums()) core->fused_adam_step(fused);
  }
}

// Calls `call`; ranks that wait for this one raise with an exception that leaves it.
void ZeroOptimizer::or_abandon(const std::function<void()>& call) {
  try {
    call();
  } catch (...) {
    cores_->abandon_step(text_of(std::current_exception()));
    throw;
  }
}

void ZeroOptimizer::zero_grad(bool set_to_none) { cores_->zero_grad(set_to_none); }

std::vector<GradNormPart> ZeroOptimizer::gradients() const {
  join_.refuse_parts();
  return parts_of_gradients();
}

std::vector<GradNormPart> ZeroOptimizer::parts_of_gradients() const {
  std::vector<GradNormPart> parts;
  for (const auto& core : cores_->live()) {
    std::vector<int64_t> all(core->parameter_infos().size());
    std::iota(all.begin(), all.end(), int64_t{0});
    parts.push_back(core->gradients(all));
  }
  return parts;
}

at::Tensor ZeroOptimizer::clip_grad_norm_(double max_norm, double norm_type,
                                          bool error_if_nonfinite) {
  join_.before_clip(max_norm, norm_type, error_if_nonfinite);
  return trireme::clip_grad_norm_(parts_of_gradients(), {max_norm, norm_type, error_if_nonfinite});
}

void ZeroOptimizer::set_synchronize(bool synchronize) {
  synchronize_ = synchronize;
  cores_->set_synchronize(synchronize);
}

ZeroOptimizer::NoSync::NoSync(ZeroOptimizer& optimizer)
    : optimizer_(optimizer), before_(optimizer.synchronize_) {
  if (optimizer.options_.stage == 1) {
    optimizer.refuse("got no_sync() under stage 1, where DistributedDataParallel averages",
                     "Use the no_sync() of the wrapped module.");
  }
  optimizer.cores().live();
  optimizer_.set_synchronize(false);
}

ZeroOptimizer::NoSync::~NoSync() { optimizer_.set_synchronize(before_); }

ZeroOptimizer::Writing::Writing(ZeroOptimizer& optimizer)
    : optimizer_(optimizer), exceptions_before_(std::uncaught_exceptions()) {
  for (const auto& core : optimizer_.cores().live()) core->begin_writing();
}

ZeroOptimizer::Writing::~Writing() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_before_) {
    optimizer_.cores().abandon_step("an exception left writing(); see that rank");
    return;
  }
  for (const auto& core : optimizer_.cores().all()) core->end_writing();
}

StepReport ZeroOptimizer::last_step() const {
  if (options_.stage == 1) {
    refuse("got last_step() under stage 1, which moves no gradients",
           "Ask the DistributedDataParallel module.");
  }
  return cores_->live().front()->reducer()->last_step();
}

void ZeroOptimizer::consolidate(int64_t to) {
  const RankOf where = communicator_->rank_of();
  if (to < 0 || to >= where.world) {
    refuse("got rank " + std::to_string(to) + " to consolidate on",
           "Pass 0 to " + std::to_string(where.world - 1) + ".");
  }
  const std::vector<ShardedParameter> parameters = cores_->sharded_parameters();
  OptimizerArchive content = take_apart(*local_);
  std::vector<ArchivedValues> own(parameters.size());
  size_t next = 0;  // the local optimizer has those of this rank only, in the same order
  for (size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].is_owned_by(where.rank)) own[i] = std::move(content.states[next++]);
  try {
    consolidated_ = gather_states(own, parameters, *communicator_, to);
  } catch (const c10::TypeError&) {
    throw;  // on all ranks
  } catch (const std::exception& error) {
    cores_->abandon_step(what_of(error));
    throw;
  }
}

void ZeroOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const auto count = std::accumulate(group_counts_.begin(), group_counts_.end(), int64_t{0});
  if (static_cast<int64_t>(consolidated_.size()) != count) {
    refuse("got save() of a state that was not consolidated here",
           "Call consolidate(" + std::to_string(communicator_->rank()) + ") on all ranks before.");
  }
  OptimizerArchive content{group_counts_, {}, consolidated_};
  for (const OptimizerParamGroup& group : param_groups_)
    content.options.push_back(take_apart(group.options()));
  write_optimizer_archive(content, archive);
}

void ZeroOptimizer::load(torch::serialize::InputArchive& archive) {
  OptimizerArchive content = read_optimizer_archive(archive);
  if (content.group_counts != group_counts_) {
    refuse("got an archive of groups of " + c10::str(at::IntArrayRef(content.group_counts)) +
               " parameters, expected " + c10::str(at::IntArrayRef(group_counts_)),
           "Load the state of the same model and groups.");
  }
  for (size_t g = 0; g < group_counts_.size(); ++g) {
    const ArchivedValues options = take_apart(param_groups_[g].options());
    const bool are_ours = std::equal(
        options.begin(), options.end(), content.options[g].begin(), content.options[g].end(),
        [](const auto& a, const auto& b) { return a.first == b.first; });
    if (!are_ours) {
      refuse("got an archive of another optimizer than this one",
             "Load the state of the same torch::optim class.");
    }
  }
  const std::vector<ShardedParameter> parameters = cores_->sharded_parameters();
  OptimizerArchive local{{}, content.options, {}};
  size_t next = 0;
  for (const int64_t count : group_counts_) {
    int64_t& owned = local.group_counts.emplace_back(0);
    for (int64_t i = 0; i < count; ++i, ++next) {
      ArchivedValues part =
          own_part(content.states[next], parameters[next], communicator_->rank_of());
      if (!parameters[next].is_owned_by(communicator_->rank())) continue;
      local.states.push_back(std::move(part));
      ++owned;
    }
  }
  put_into(*local_, local);
  for (size_t g = 0; g < param_groups_.size(); ++g)
    param_groups_[g].set_options(local_->param_groups()[g].options().clone());
}

void ZeroOptimizer::add_parts(HeldParts& parts) const {
  check_groups();
  if (options_.placement == ShardPlacement::kFlat) {
    refuse("got a checkpoint of shards that are no rows (ShardPlacement::kFlat)",
           "Leave ZeroOptions::placement out, or use consolidate() and torch::save.");
  }
  const std::vector<ShardedParameter> parameters = cores_->sharded_parameters();
  const std::vector<at::Tensor> tensors = cores_->parameters();
  const std::vector<at::Tensor> shards = cores_->shards();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& info = parameters[i].info;
    std::vector<int64_t> first(info.sizes.size());
    const ShardRange& range = parameters[i].ranges[static_cast<size_t>(communicator_->rank())];
    if (range.begin > 0) first.front() = range.begin / (info.numel / info.sizes.front());
    parts[tensors[i].unsafeGetTensorImpl()] = {shards[i], info.sizes, std::move(first)};
  }
}

void ZeroOptimizer::begin_writing() {
  for (const auto& core : cores_->all()) core->begin_writing_shards();
}

void ZeroOptimizer::end_writing() {
  for (const auto& core : cores_->all()) core->end_writing_shards();
}

void ZeroOptimizer::refuse(const std::string& got, const std::string& next_step) const {
  C10_THROW_ERROR(ValueError, error_text("zero", got, communicator_->rank_of(), next_step));
}

}  // namespace trireme
