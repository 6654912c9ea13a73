#include <trireme/strategies/fsdp/unit_reducers.h>

#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/grad/codes/compressed_transport.h>
#include <trireme/grad/codes/replica_codes.h>
#include <trireme/grad/collective_transport.h>

#include <algorithm>
#include <exception>
#include <utility>

// See [Note: units on several meshes] in unit_reducers.h.

namespace trireme {
namespace {

// Returns which rank gets which elements of a gradient, as it lies in memory.
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
  OwnerDelivery::Owners owners;
  for (const size_t one : part.groups) {
    const ParamGroup& group = *request.groups[one];
    for (size_t i = 0; i < group.params().size(); ++i) {
      const ShardedParam& param = group.params()[i];
      const ShardedParamSpec& spec = param.spec();
      if (spec.grad_dtype) group.leaves()[i].set_grad_dtype(spec.wire_dtype());
      parameters.tensors.push_back(group.leaves()[i]);
      owners.leaves.push_back(param.gradient_leaf());
      owners.dtypes.push_back(spec.gradient_dtype());
      options.reduce_dtypes.emplace_back(spec.wire_dtype());
      part.stored.push_back(stored_info(spec, spec.dtype));
      part.stored.back().name = parameters.names[part.stored.size() - 1];
    }
  }
  const size_t first = part.groups.front();
  const std::shared_ptr<Communicator>& sharers = request.groups[first]->communicator();
  const FsdpRanks& ranks = request.ranks[request.ranks_of[first]];
  owners.own = part.own = {
      std::make_shared<const ShardPlan>(plan_of(part.stored, sharers->world())), sharers->rank()};
  owners.has_replicas = ranks.replicates_with != nullptr;
  part.trigger = std::make_shared<BackwardTrigger>(/*at_parameters=*/true);
  part.delivery = std::make_shared<OwnerDelivery>(part.trigger, std::move(owners));
  GradReducerParts parts;
  parts.communicator = ranks.communicator;
  parts.trigger = part.trigger;
  parts.delivery = part.delivery;
  parts.transport = make_transport(request, part);
  part.reducer = GradReducer::make(parameters, std::move(parts), options);
}

// Codes go between all ranks that train or, under HSDP, between those that have the same shards.
std::unique_ptr<Transport> UnitReducers::make_transport(const Request& request, Part& part) {
  const size_t first = part.groups.front();
  const FsdpRanks& ranks = request.ranks[request.ranks_of[first]];
  const std::shared_ptr<Communicator>& scattering =
      ranks.scatters_with ? ranks.scatters_with : request.groups[first]->communicator();
  const std::shared_ptr<Communicator>& replicas = ranks.replicates_with;
  const std::optional<Compression>& compression = request.compression;
  if (compression && !replicas) {
    if (auto coded = make_compressed_transport(ranks.communicator, *compression)) {
      part.coder = &coded->coder();
      return coded;
    }
  } else if (compression && has_several_senders(*replicas, between(*compression))) {
    auto coded = std::make_unique<ReplicaCodesTransport>(
        ReplicaCodesTransport::Ranks{ranks.communicator, scattering, replicas}, *compression,
        coded_shards(part.stored, part.own));
    part.coder = &coded->coder();
    part.codes_shards = true;
    return coded;
  }
  return std::make_unique<CollectiveTransport>(ranks.communicator, scattering,
                                               replicas ? make_replica_sum(replicas) : nullptr);
}

UnitReducers::UnitReducers(const Request& request)
    : groups_(std::make_shared<const Groups>(request.groups)) {
  std::vector<std::shared_ptr<Part>> parts(request.ranks.size());
  for (auto& part : parts) part = std::make_shared<Part>();
  int64_t parameter = 0;
  for (size_t i = 0; i < request.groups.size(); ++i) {
    Part& part = *parts.at(request.ranks_of.at(i));
    part.groups.push_back(i);
    for (size_t k = 0; k < request.groups[i]->params().size(); ++k)
      part.parameters.push_back(parameter++);
  }
  std::vector<std::shared_ptr<BackwardTrigger>> triggers;
  for (const std::shared_ptr<Part>& part : parts) {
    if (part->groups.empty()) continue;  // units without parameters of their own
    part->all = groups_;
    make_reducer(request, *part);
    part->trigger->ask_to_synchronize([groups = groups_] { return any_synchronizes(*groups); });
    part->trigger->set_armed_callback([held = std::weak_ptr<Part>(part)] {
      const auto alive = held.lock();
      if (!alive) return;
      if (alive->armed) alive->armed();
      alive->read_flags();
      alive->read_unused();
    });
    triggers.push_back(part->trigger);
    parts_.push_back(part);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !request.compression || parts_.size() < 2,
      error_text("fully_shard", "got compression for units on several meshes",
                 request.ranks.front().communicator->rank_of(),
                 "Leave it out, or give all units the mesh of the outermost one."));
  if (triggers.size() > 1) BackwardTrigger::arm_together(triggers);
}

bool UnitReducers::any_synchronizes(const Groups& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const auto& group) { return group->flags().synchronizes; });
}

void UnitReducers::Part::read_flags() {
  const bool synchronizes = any_synchronizes(*all);
  std::vector<bool> held;
  std::vector<bool> deferred;
  std::vector<double> factors;
  for (size_t i = 0; i < groups.size(); ++i) {
    const UnitFlags& flags = group(i).flags();
    const size_t count = group(i).params().size();
    held.insert(held.end(), count, synchronizes && !flags.synchronizes);
    deferred.insert(deferred.end(), count, !flags.all_reduces);
    factors.insert(factors.end(), count, flags.divide_factor);
  }
  delivery->hold(held);
  delivery->defer_all_reduce(deferred);
  delivery->set_divide_factors(std::move(factors));
  read_hooks();
}

void UnitReducers::Part::read_hooks() {
  std::vector<AllReduceHook> hooks;
  std::vector<size_t> counts;
  bool has_any = false;
  for (size_t i = 0; i < groups.size(); ++i) {
    const AllReduceHook& hook = group(i).flags().all_reduce_hook;
    has_any = has_any || hook;
    hooks.push_back(hook ? telling(hook) : nullptr);
    counts.push_back(group(i).params().size());
  }
  if (has_any || has_hooks) set_all_reduce_hooks(*delivery, std::move(hooks), counts);
  has_hooks = has_any;
}

// Returns a hook that reports what `hook` throws.
AllReduceHook UnitReducers::Part::telling(AllReduceHook hook) const {
  return [hook = std::move(hook), tell = tell_hook_error](at::Tensor& gradients) {
    try {
      hook(gradients);
    } catch (const std::exception& error) {
      if (tell) tell(first_line_of(error));
      throw;
    }
  };
}

void UnitReducers::Part::read_unused() const {
  if (!ask_for_unused) return;
  const std::vector<bool> unused_groups = ask_for_unused();
  if (unused_groups.empty()) return;
  std::vector<bool> unused;
  for (size_t i = 0; i < groups.size(); ++i)
    unused.insert(unused.end(), group(i).params().size(), unused_groups.at(groups[i]));
  reducer->expect_none(std::move(unused));
}

void UnitReducers::meet_senders() {
  for (const auto& part : parts_)
    if (part->coder != nullptr) part->coder->senders();
}

void UnitReducers::before_forward() {
  for (const auto& part : parts_) part->trigger->before_forward();
}

void UnitReducers::after_forward(const std::vector<at::Tensor>& outputs, bool all_found) {
  for (const auto& part : parts_)
    part->trigger->after_forward(outputs, /*synchronize=*/true, all_found);
}

void UnitReducers::set_synchronize(bool synchronize) {
  for (const auto& part : parts_) part->trigger->set_synchronize(synchronize);
}

void UnitReducers::shadow_backward() {
  for (const auto& part : parts_) {
    part->read_flags();
    part->reducer->shadow_backward(/*deliver=*/true);
  }
}

void UnitReducers::announce_failure(const std::string& text) noexcept {
  for (const auto& part : parts_) part->reducer->announce_failure(text);
}

void UnitReducers::reduce_accumulated() {
  for (const auto& part : parts_) {
    part->read_flags();
    part->reducer->reduce_accumulated();
  }
}

bool UnitReducers::lack_gradients() const {
  return !parts_.empty() && std::all_of(parts_.begin(), parts_.end(), [](const auto& part) {
    return part->reducer->lacks_gradients();
  });
}

void UnitReducers::drop_accumulated() {
  for (const auto& part : parts_) part->delivery->drop_accumulated();
}

void UnitReducers::set_divisor(double divisor) {
  for (const auto& part : parts_) part->reducer->set_divisor(divisor);
}

void UnitReducers::set_memory_source(const BufferPool::Source& source) {
  for (const auto& part : parts_) part->reducer->set_memory_source(source);
}

void UnitReducers::set_delivered_callback(const GradReducer::DeliveredCallback& callback) {
  for (const auto& part : parts_) {
    part->reducer->set_delivered_callback(
        [callback, parameters = part->parameters](const std::vector<int64_t>& own) {
          std::vector<int64_t> all;
          for (const int64_t index : own) all.push_back(parameters[static_cast<size_t>(index)]);
          callback(all);
        });
  }
}

void UnitReducers::ask_for_unused(const std::function<std::vector<bool>()>& groups) {
  for (const auto& part : parts_) part->ask_for_unused = groups;
}

void UnitReducers::tell_hook_errors(std::function<void(const std::string& what)> callback) {
  for (const auto& part : parts_) part->tell_hook_error = callback;
}

std::vector<KeptCodes> UnitReducers::kept_codes() const {
  std::vector<KeptCodes> codes;
  for (const auto& part : parts_) {
    if (part->coder == nullptr) continue;
    const BucketLayout& layout = part->reducer->layout();
    codes.push_back({part->coder, part->codes_shards ? part->stored : layout.infos(),
                     layout.parameters(), part->codes_shards ? part->own : OwnShards()});
  }
  return codes;
}

StepReport UnitReducers::last_step() const {
  StepReport all = parts_.front()->reducer->last_step();
  for (size_t i = 1; i < parts_.size(); ++i) {
    const StepReport one = parts_[i]->reducer->last_step();
    all.backward_ms = std::max(all.backward_ms, one.backward_ms);
    all.waiting_ms += one.waiting_ms;
    all.exposed_comm_ms += one.exposed_comm_ms;
    all.hidden_comm_ms += one.hidden_comm_ms;
    all.reduced_bytes += one.reduced_bytes;
    all.buckets += one.buckets;
    all.sent_bytes += one.sent_bytes;
    all.encode_ms += one.encode_ms;
    all.streamed = all.streamed && one.streamed;
  }
  return all;
}

}  // namespace trireme
