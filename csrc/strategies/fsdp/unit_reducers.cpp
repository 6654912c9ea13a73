#include <trireme/strategies/fsdp/unit_reducers.h>

#include <trireme/grad/collective_wire.h>

#include <algorithm>
#include <utility>

// See [Note: units on several meshes] in unit_reducers.h.

namespace trireme {
namespace {

// Says which rank gets which elements of a gradient, as it lies in memory.
ShardPlan plan_of(const std::vector<ParameterInfo>& stored, int64_t world) {
  ShardPlan plan = make_shard_plan({stored, world, ShardPlacement::kDim0});
  for (size_t i = 0; i < stored.size(); ++i)  // every rank steps its own
    if (stored[i].sizes.empty())
      std::fill(plan.shards[i].begin(), plan.shards[i].end(), ShardRange{0, 1});
  return plan;
}

}  // namespace

void UnitReducers::make_reducer(const Request& request, Part& part) {
  NamedParameters parameters;
  for (const int64_t index : part.parameters)
    parameters.names.push_back(request.names[static_cast<size_t>(index)]);
  parameters.sparse_gradient.assign(parameters.names.size(), false);
  GradReducerOptions options;
  options.area = "fully_shard";
  OwnerLanding::Owners owners;
  std::vector<ParameterInfo> stored;
  for (const size_t one : part.groups) {
    const ParamGroup& group = *request.groups[one];
    for (size_t i = 0; i < group.params().size(); ++i) {
      const ShardedParam& param = group.params()[i];
      const ShardedParamSpec& spec = param.spec();
      parameters.tensors.push_back(group.leaves()[i]);
      owners.leaves.push_back(param.gradient_leaf());
      options.reduce_dtypes.emplace_back(spec.reduce_dtype.value_or(spec.dtype));
      stored.push_back(stored_info(spec, spec.dtype));
    }
  }
  const size_t first = part.groups.front();
  const std::shared_ptr<Communicator>& sharers = request.groups[first]->communicator();
  const FsdpRanks& ranks = request.ranks[request.ranks_of[first]];
  owners.own = {std::make_shared<const ShardPlan>(plan_of(stored, sharers->world())),
                sharers->rank()};
  owners.has_replicas = ranks.replicates_with != nullptr;
  part.arming = std::make_shared<Arming>(/*at_parameters=*/true);
  part.landing = std::make_shared<OwnerLanding>(part.arming, std::move(owners));
  GradReducerParts parts;
  parts.communicator = ranks.communicator;
  parts.arming = part.arming;
  parts.landing = part.landing;
  parts.wire = std::make_unique<CollectiveWire>(
      ranks.communicator, ranks.scatters_with ? ranks.scatters_with : sharers,
      ranks.replicates_with ? make_replica_sum(ranks.replicates_with) : nullptr);
  part.reducer = GradReducer::make(parameters, std::move(parts), options);
}

UnitReducers::UnitReducers(const Request& request) {
  std::vector<Part> parts(request.ranks.size());
  int64_t parameter = 0;
  for (size_t i = 0; i < request.groups.size(); ++i) {
    Part& part = parts.at(request.ranks_of.at(i));
    part.groups.push_back(i);
    part.numbers_of_parameters.push_back(request.groups[i]->params().size());
    for (size_t k = 0; k < part.numbers_of_parameters.back(); ++k)
      part.parameters.push_back(parameter++);
  }
  std::vector<std::shared_ptr<Arming>> armings;
  for (Part& part : parts) {
    if (part.groups.empty()) continue;  // units without parameters of their own
    make_reducer(request, part);
    armings.push_back(part.arming);
    parts_.push_back(std::move(part));
  }
  if (armings.size() > 1) Arming::arm_together(armings);
}

template <typename Value>
std::vector<Value> UnitReducers::Part::of_groups(const std::vector<Value>& all) const {
  std::vector<Value> own;
  for (const size_t group : groups) own.push_back(all.at(group));
  return own;
}

template <typename Value>
std::vector<Value> UnitReducers::Part::of_parameters(const std::vector<Value>& all_groups) const {
  std::vector<Value> own;
  for (size_t i = 0; i < groups.size(); ++i)
    own.insert(own.end(), numbers_of_parameters[i], all_groups.at(groups[i]));
  return own;
}

void UnitReducers::before_forward() {
  for (const Part& part : parts_) part.arming->before_forward();
}

void UnitReducers::after_forward(const std::vector<at::Tensor>& outputs, bool all_found) {
  for (const Part& part : parts_)
    part.arming->after_forward(outputs, /*synchronize=*/true, all_found);
}

void UnitReducers::set_synchronize(bool synchronize) {
  for (const Part& part : parts_) part.arming->set_synchronize(synchronize);
}

void UnitReducers::shadow_backward() {
  for (const Part& part : parts_) part.reducer->shadow_backward(/*deliver=*/true);
}

void UnitReducers::announce_failure(const std::string& text) noexcept {
  for (const Part& part : parts_) part.reducer->announce_failure(text);
}

void UnitReducers::reduce_accumulated() {
  for (const Part& part : parts_) part.reducer->reduce_accumulated();
}

void UnitReducers::drop_accumulated() {
  for (const Part& part : parts_) part.landing->drop_accumulated();
}

void UnitReducers::hold(const std::vector<bool>& groups) {
  for (const Part& part : parts_) part.landing->hold(part.of_parameters(groups));
}

void UnitReducers::defer_all_reduce(const std::vector<bool>& groups) {
  for (const Part& part : parts_) part.landing->defer_all_reduce(part.of_parameters(groups));
}

void UnitReducers::set_divide_factors(const std::vector<double>& groups) {
  for (const Part& part : parts_) part.landing->set_divide_factors(part.of_parameters(groups));
}

void UnitReducers::set_all_reduce_hooks(const std::vector<AllReduceHook>& groups) {
  for (const Part& part : parts_)
    trireme::set_all_reduce_hooks(*part.landing, part.of_groups(groups),
                                  part.numbers_of_parameters);
}

void UnitReducers::set_divisor(double divisor) {
  for (const Part& part : parts_) part.reducer->set_divisor(divisor);
}

void UnitReducers::set_memory_source(const BufferPool::Source& source) {
  for (const Part& part : parts_) part.reducer->set_memory_source(source);
}

void UnitReducers::set_delivered_callback(const GradReducer::DeliveredCallback& callback) {
  for (const Part& part : parts_) {
    part.reducer->set_delivered_callback(
        [callback, parameters = part.parameters](const std::vector<int64_t>& own) {
          std::vector<int64_t> all;
          for (const int64_t index : own) all.push_back(parameters[static_cast<size_t>(index)]);
          callback(all);
        });
  }
}

void UnitReducers::ask_for_unused(const std::function<std::vector<bool>()>& groups) {
  for (const Part& part : parts_) {
    part.arming->set_armed_callback([groups, part = &part] {
      const std::vector<bool> unused = groups();
      if (!unused.empty()) part->reducer->expect_none(part->of_parameters(unused));
    });
  }
}

StepReport UnitReducers::last_step() const {
  StepReport all = parts_.front().reducer->last_step();
  for (size_t i = 1; i < parts_.size(); ++i) {
    const StepReport one = parts_[i].reducer->last_step();
    all.backward_ms = std::max(all.backward_ms, one.backward_ms);
    all.waiting_ms += one.waiting_ms;
    all.exposed_comm_ms += one.exposed_comm_ms;
    all.hidden_comm_ms += one.hidden_comm_ms;
    all.reduced_bytes += one.reduced_bytes;
    all.buckets += one.buckets;
    all.streamed = all.streamed && one.streamed;
  }
  return all;
}

}  // namespace trireme
