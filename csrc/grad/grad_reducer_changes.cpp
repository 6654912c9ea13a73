#include <trireme/grad/grad_reducer.h>
#include <trireme/grad/plan_agreement.h>
#include <trireme/memory/tensor_samples.h>
#include <trireme/memory/value_hash.h>

#include <ATen/ATen.h>

#include <unordered_map>
#include <utility>

namespace trireme {

// [Note: a module that changes]
//
// The layout of a step stays, so that all ranks have the same, whatever a user has changed before
// it: a parameter that is no longer what its slot was planned for (frozen, cast, of other sizes)
// leaves the slot empty. A rank that has seen a change says so in the used-map. Then all ranks
// compare notes when that backward ends, and reduce what the layout did not hold: what they find in
// the .grad of those parameters is the average before backward returns.
//
// If some rank has other tensors than were planned (a replaced layer, load_state_dict(assign=True),
// an added or a removed one) or tensors of other sizes, the ranks compare whole lists. If these are
// alike, the reducer begins anew with them, and rank 0's values of what is new go to all; else
// every rank raises. A tensor is known by its identity, not by its name.
//
// A module is looked at when its forward is over, since a forward may register parameters itself.
// What is found then may only be lent (torch.func.functional_call puts other tensors in the place
// of parameters as long as the forward runs), so it is looked at again when the backward is armed.
// Until all have agreed, hooks on the newcomers arm a backward that reaches nothing else, and tell
// which of them were used.
//
// A parameter whose `.data` was given other memory of the same sizes is the same one, and its
// gradient is averaged as before. But whoever does so on one rank only, or with other values there,
// trains another model on each rank from then on. So ranks compare samples of what lies elsewhere
// on some rank, and warn. It is no error: ranks that average models instead of gradients may mean
// it.

namespace {

std::unordered_map<const at::TensorImpl*, int64_t> places_of(const std::vector<at::Tensor>& all) {
  std::unordered_map<const at::TensorImpl*, int64_t> places;
  for (size_t i = 0; i < all.size(); ++i)
    places[all[i].unsafeGetTensorImpl()] = static_cast<int64_t>(i);
  return places;
}

// Hashes the bits of some elements; every rank takes the same ones.
int64_t hash_of_samples(const at::Tensor& tensor, int64_t seed) {
  const at::NoGradGuard no_grad;
  const std::vector<int64_t> positions =
      sample_positions(tensor.numel(), tensor.element_size(), static_cast<uint64_t>(seed));
  const at::Tensor index = at::tensor(positions, at::kLong).to(tensor.device());
  return static_cast<int64_t>(hash_of_values(tensor.detach().reshape(-1).index_select(0, index)));
}

}  // namespace

// Finds what the user changed since the last look: frozen, unfrozen, cast, given data of other
// sizes.
void GradReducer::watch_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    ParameterInfo& info = infos_[i];
    const bool requires_grad = parameter.requires_grad();
    const bool reshaped = is_reshaped(i);
    // The parameter's node knows the sizes that it had; autograd makes another one once the node is
    // gone.
    if (reshaped) hooks_[i] = {};
    const bool needs_hook = requires_grad && !hooks_[i].is_attached_to(parameter);
    const bool is_cast = parameter.scalar_type() != info.dtype;
    const bool moved = is_moved(i);
    if (requires_grad == info.requires_grad && !needs_hook && !is_cast && !reshaped && !moved)
      continue;
    TORCH_CHECK_VALUE(
        parameter.device() == info.device,
        error_text(options_.area,
                   "got '" + info.name + "' on " + parameter.device().str() + ", expected it on " +
                       info.device.str() + " where it was when the module was wrapped",
                   communicator_->rank_of(), "Move the module before wrapping it."));
    if (needs_hook) {
      const auto index = static_cast<int64_t>(i);
      hooks_[i] = GradHook(parameter, index, *this, options_.shards != nullptr);
      mark_seen_late(i);
    }
    if (requires_grad != info.requires_grad || is_cast || reshaped || moved) used_.mark_changed();
    info.requires_grad = requires_grad;
  }
}

void GradReducer::watch_module(ModuleWatch watch) {
  const std::lock_guard lock(mutex_);
  watch_ = std::move(watch);
}

void GradReducer::look_at_module() {
  if (!watch_.look) return;
  present_ = watch_.look(/*thoroughly=*/false);
  if (!present_) return newcomers_.clear();
  const std::unordered_map<const at::TensorImpl*, int64_t> planned = places_of(parameters_);
  std::unordered_map<const at::TensorImpl*, size_t> places;
  for (size_t i = 0; i < newcomers_.size(); ++i)
    places[newcomers_[i].tensor.unsafeGetTensorImpl()] = i;
  for (const at::Tensor& tensor : present_->parameters.tensors) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (!tensor.requires_grad() || planned.count(impl) > 0) continue;
    const auto [found, is_first] = places.emplace(impl, newcomers_.size());
    if (is_first) newcomers_.push_back({tensor, {}});
    Newcomer& newcomer = newcomers_[found->second];
    const auto index = static_cast<int64_t>(parameters_.size() + found->second);
    if (!newcomer.hook.is_attached_to(tensor)) newcomer.hook = GradHook(tensor, index, *this);
  }
}

// Looks again when a backward is armed: what was lent for the length of a forward is no change.
// Hooks stay as they are, since one of them may be what arms.
void GradReducer::look_again(bool shadow) {
  if (!watch_.look) return;
  if (shadow) watch_parameters();
  if (present_ || shadow) present_ = watch_.look(/*thoroughly=*/true);
  if (present_) used_.mark_changed();
}

void GradReducer::newcomer_ready(size_t newcomer, bool has_gradient) {
  if (has_gradient) newcomers_[newcomer].used = true;
  if (phase_ != Phase::kRunning) {
    if (!arm_at_parameter_ && !force_synchronize_) return;
    arm();
    if (phase_ != Phase::kRunning) return;
  }
  check_kind(newcomers_[newcomer].tensor, "a parameter that came after wrapping", has_gradient);
}

// Leaves the slots of changed parameters empty; see [Note: a module that changes].
void GradReducer::leave_out_changed() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_cast = parameters_[i].scalar_type() != infos_[i].dtype;
    if (!is_cast && !is_reshaped(i)) continue;
    used_.mark_changed();
    if (places_[i].bucket >= 0)
      buckets_[static_cast<size_t>(places_[i].bucket)].leave_empty(
          static_cast<size_t>(places_[i].slot));
    places_[i] = {};
    plan_is_stale_ = true;
  }
}

// Settles changes after some rank froze, unfroze, cast or replaced parameters: all ranks compare
// notes at the end of this backward. A rank that is late has seen no change itself, and is about to
// begin another backward.
void GradReducer::settle_change(bool late) {
  std::vector<ParameterState> states;
  bool replans = present_.has_value();
  for (size_t i = 0; i < infos_.size(); ++i) {
    const bool is_used = used_.used_here(static_cast<int64_t>(i));
    states.push_back({infos_[i].requires_grad, is_used, parameters_[i].scalar_type(),
                      is_moved(i) && !is_reshaped(i)});
    replans = replans || is_reshaped(i);
  }
  const AgreedStates agreed = agree_on_states(*communicator_, infos_.front().device, infos_, states,
                                              replans && !late, options_.area);
  if (agreed.replans) return replan(late);
  compare_moved_values(agreed.moved);
  std::vector<int64_t> order;
  std::vector<bool> is_ordered(infos_.size(), false);
  for (const int64_t index : order_) {
    if (!infos_[static_cast<size_t>(index)].requires_grad) continue;
    order.push_back(index);
    is_ordered[static_cast<size_t>(index)] = true;
  }
  std::vector<int64_t> left_out;
  for (size_t i = infos_.size(); i-- > 0;) {
    infos_[i].dtype = states[i].dtype;
    if (!infos_[i].requires_grad || places_[i].bucket >= 0 || held_[i]) continue;
    left_out.push_back(static_cast<int64_t>(i));
    if (!is_ordered[i]) order.push_back(static_cast<int64_t>(i));
  }
  if (!left_out.empty()) reduce_left_out(left_out, agreed.used);
  order_ = std::move(order);
  plan_is_stale_ = true;
}

// Compares the parameters that lie elsewhere than they did on some rank.
void GradReducer::compare_moved_values(const std::vector<bool>& moved) {
  std::vector<size_t> compared;
  for (size_t i = 0; i < moved.size(); ++i)
    if (moved[i]) compared.push_back(i);
  if (compared.empty() || storages_.empty()) return;
  const c10::Device device = infos_.front().device;
  const auto count = static_cast<int64_t>(compared.size());
  at::Tensor hashes = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const size_t index = compared[static_cast<size_t>(i)];
    hashes.mutable_data_ptr<int64_t>()[i] = hash_of_samples(parameters_[index], step_);
    storages_[index] = storage_of(parameters_[index]);
  }
  hashes = hashes.to(device);
  const at::Tensor received = at::empty({communicator_->world() * count}, hashes.options());
  communicator_->all_gather({received}, {hashes}, "samples of parameters in other memory").wait();
  const at::Tensor all = received.to(at::kCPU);
  const auto* theirs = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < communicator_->world() * count; ++i) {
    if (theirs[i] == theirs[i % count]) continue;
    storages_.clear();  // once is enough
    TORCH_WARN(error_text(
        options_.area,
        "got '" + name_of(static_cast<int64_t>(compared[static_cast<size_t>(i % count)])) +
            "' with other values on rank " + std::to_string(i / count) +
            " than on rank 0 since its .data was given other memory, expected the same values: "
            "gradients are averaged, and each rank goes on with a model of its own",
        communicator_->rank_of(), "Give all ranks the same values."));
    return;
  }
}

// Begins anew with the parameters that all ranks have now, or throws on all of them.
void GradReducer::replan(bool late) {
  ModuleNow now;
  if (watch_.look && !present_ && !late) present_ = watch_.look(/*thoroughly=*/true);
  if (present_ && !late) {
    now = *present_;
  } else {
    now.parameters.tensors = parameters_;
    for (const ParameterInfo& info : infos_) {
      now.parameters.names.push_back(info.name);
      now.parameters.sparse_gradient.push_back(info.sparse_gradient);
    }
  }
  const std::vector<ParameterInfo> infos = late ? infos_ : describe_parameters(now.parameters);
  const std::unordered_map<const at::TensorImpl*, int64_t> planned = places_of(parameters_);
  const auto is_used = [&](const at::Tensor& tensor) {  // one that is not planned
    for (const Newcomer& one : newcomers_)
      if (one.tensor.is_same(tensor)) return one.used;
    return tensor.grad().defined();
  };

  std::vector<int64_t> earlier;
  std::vector<ParameterState> states;
  std::vector<int64_t> left_out;
  std::vector<int64_t> fresh;
  std::vector<const c10::StorageImpl*> storages;
  for (size_t i = 0; i < infos.size(); ++i) {
    const at::Tensor& tensor = now.parameters.tensors[i];
    const auto found = planned.find(tensor.unsafeGetTensorImpl());
    earlier.push_back(found == planned.end() ? -1 : found->second);
    const bool is_new = earlier[i] < 0;
    const auto at = static_cast<size_t>(is_new ? 0 : earlier[i]);
    const bool used = is_new ? is_used(tensor) : used_.used_here(earlier[i]);
    states.push_back({infos[i].requires_grad, used, infos[i].dtype});
    const bool is_fresh = is_new || is_reshaped(at);
    if (is_fresh) fresh.push_back(static_cast<int64_t>(i));
    // One that is kept, and lies elsewhere, is compared after the next backward.
    if (!storages_.empty()) storages.push_back(is_fresh ? storage_of(tensor) : storages_[at]);
    if (infos[i].requires_grad && (is_new || places_[at].bucket < 0))
      left_out.push_back(static_cast<int64_t>(i));
  }
  const ParameterChange change{infos_, infos, earlier, now.beside};
  check_same_change(*communicator_, infos_.front().device, change, options_.area);
  check_replannable(change);
  const AgreedStates agreed =
      agree_on_states(*communicator_, infos.front().device, infos, states, false, options_.area);
  present_.reset();
  set_parameters(now.parameters);
  storages_ = std::move(storages);
  replanned_at_ = step_;
  if (watch_.adopted) watch_.adopted();
  spread_values(fresh);
  if (!left_out.empty()) reduce_left_out(left_out, agreed.used);
}

// Refuses what cannot be planned anew. All ranks have `change` alike, and throw alike.
void GradReducer::check_replannable(const ParameterChange& change) const {
  const auto refuse = [&](bool is_fine, const std::string& got, const char* next_step) {
    TORCH_CHECK_VALUE(is_fine, error_text(options_.area, got, communicator_->rank_of(), next_step));
  };
  refuse(!options_.shards,
         "got parameters that changed since they were sharded: " + describe_change(change),
         "Make the optimizer anew.");
  refuse(!change.present.empty(), "got a module that has lost its last parameter",
         "Use the module as it is: there is nothing to average.");
  for (const ParameterInfo& info : change.present) {
    const c10::Device device = infos_.front().device;
    refuse(info.device.type() == device.type(),
           "got '" + info.name + "' on " + info.device.str() + ", expected it on " + device.str() +
               " as the others",
           "Move it there before the forward.");
  }
}

// Spreads rank 0's values of parameters that the ranks have made since they began with the same.
void GradReducer::spread_values(const std::vector<int64_t>& parameters) {
  if (parameters.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const int64_t index : parameters)
    values.push_back(parameters_[static_cast<size_t>(index)].detach().clone());
  communicator_->broadcast(values, 0, "values of new parameters").wait();
  std::string differs;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor here = parameters_[static_cast<size_t>(parameters[i])].detach();
    // What is equal is not written, so that a graph that needs it may be used once more.
    if (at::equal(here, values[i])) continue;
    here.copy_(values[i]);
    if (differs.empty()) differs = name_of(parameters[i]);
  }
  if (differs.empty()) return;
  TORCH_WARN(error_text(options_.area,
                        "got '" + differs +
                            "' with other values than on rank 0, whose values it has from now on; "
                            "gradients of this step were taken at its own",
                        communicator_->rank_of(),
                        "Set torch's seed on all ranks before you make layers."));
}

// Reduces gradients that this backward produced but the layout of this step did not hold.
void GradReducer::reduce_left_out(const std::vector<int64_t>& left_out,
                                  const std::vector<bool>& used) {
  const BucketPlan plan = make_plan(left_out);
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    Bucket bucket(plan.buckets[b], parameters_, 0, own_shards(may_scatter()));
    bucket.begin_step(shadow_);
    bucket.complete(scale());
    const std::string label = "left-out " + bucket_label(plan, b, infos_);
    Pending pending = compressor_->reduce({bucket, parameters_, b, plan.buckets.size(), label});
    pending.wait();
    const std::vector<at::Tensor> result = pending.result();
    if (!result.empty()) bucket.take_result(result.front());
    if (options_.shards) bucket.keep_own();
    sum_over_replicas(bucket, label).wait();
    std::vector<OwnSum> sums;
    add_own_sums(bucket, sums);
    if (!sums.empty()) summed_callback_(sums);
    const std::vector<BucketSlot>& slots = plan.buckets[b].slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const auto index = static_cast<size_t>(slots[slot].parameter);
      if (!used[index] || is_deferred(index)) continue;
      deliver(bucket, slot);
      if (delivered_) delivered_({slots[slot].parameter});
    }
  }
}

}  // namespace trireme
