#include <trireme/grad/parameter_changes.h>

#include <trireme/memory/tensor_samples.h>
#include <trireme/memory/value_hash.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

// See [Note: a module that changes] in parameter_changes.h.

namespace trireme {
namespace {

std::unordered_map<const at::TensorImpl*, int64_t> places_of(const std::vector<at::Tensor>& all) {
  std::unordered_map<const at::TensorImpl*, int64_t> places;
  for (size_t i = 0; i < all.size(); ++i)
    places[all[i].unsafeGetTensorImpl()] = static_cast<int64_t>(i);
  return places;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
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

bool ParameterChanges::is_reshaped(size_t index) const {
  return parameter(index).sizes() != at::IntArrayRef(context_.layout.infos()[index].sizes);
}

bool ParameterChanges::is_cast(size_t index) const {
  return !has_described_dtypes(parameter(index), context_.layout.infos()[index]);
}

// Returns false if nothing can be planned anew: gradients are brought into the planned order then.
bool ParameterChanges::is_rearranged(size_t index) const {
  return context_.delivery.traits().may_replan &&
         !lies_as_described(parameter(index), context_.layout.infos()[index]);
}

bool ParameterChanges::is_moved(size_t index) const {
  return !storages_.empty() && storages_[index] != storage_of(parameter(index));
}

void ParameterChanges::begin() {
  const std::vector<at::Tensor>& parameters = context_.layout.parameters();
  newcomers_.clear();
  hooks_.clear();
  hooks_.resize(parameters.size());
  storages_.clear();
  if (context_.compares_moved_values && context_.communicator.world() > 1) {
    for (const at::Tensor& tensor : parameters) storages_.push_back(storage_of(tensor));
  }
  for (const int64_t index : context_.layout.order())
    hooks_[static_cast<size_t>(index)] = GradHook(parameter(static_cast<size_t>(index)), index,
                                                  context_.sink, context_.hooks_before);
}

void ParameterChanges::watch_parameters() {
  UsedMap& used = context_.layout.used();
  for (size_t i = 0; i < hooks_.size(); ++i) {
    const at::Tensor& tensor = parameter(i);
    ParameterInfo& info = context_.layout.infos()[i];
    const bool requires_grad = tensor.requires_grad();
    const bool reshaped = is_reshaped(i);
    // The parameter's node knows its old sizes; autograd makes another one once the node is gone.
    if (reshaped) hooks_[i] = {};
    const bool needs_hook = requires_grad && !hooks_[i].is_attached_to(tensor);
    const bool changed = reshaped || is_cast(i) || is_moved(i) || is_rearranged(i);
    if (requires_grad == info.requires_grad && !needs_hook && !changed) continue;
    TORCH_CHECK_VALUE(
        tensor.device() == info.device,
        error_text(context_.area,
                   "got '" + info.name + "' on " + tensor.device().str() + ", expected it on " +
                       info.device.str() + " where it was when the module was wrapped",
                   where(), "Move the module before wrapping it."));
    if (needs_hook) {
      const auto index = static_cast<int64_t>(i);
      hooks_[i] = GradHook(tensor, index, context_.sink, context_.hooks_before);
      // The hook was perhaps put on in the middle of the backward that has already passed.
      if (context_.delivery.has_unseen(i)) used.mark_used(index);
    }
    if (requires_grad != info.requires_grad || changed) used.mark_changed();
    info.requires_grad = requires_grad;
  }
}

void ParameterChanges::look_at_module() {
  if (!watch_.look) return;
  present_ = watch_.look(/*thoroughly=*/false);
  if (!present_) return newcomers_.clear();
  const std::unordered_map<const at::TensorImpl*, int64_t> planned =
      places_of(context_.layout.parameters());
  std::unordered_map<const at::TensorImpl*, size_t> places;
  for (size_t i = 0; i < newcomers_.size(); ++i)
    places[newcomers_[i].tensor.unsafeGetTensorImpl()] = i;
  for (const at::Tensor& tensor : present_->parameters.tensors) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (!tensor.requires_grad() || planned.count(impl) > 0) continue;
    const auto [found, is_first] = places.emplace(impl, newcomers_.size());
    if (is_first) newcomers_.push_back({tensor, {}});
    Newcomer& newcomer = newcomers_[found->second];
    const auto index = static_cast<int64_t>(hooks_.size() + found->second);
    if (!newcomer.hook.is_attached_to(tensor))
      newcomer.hook = GradHook(tensor, index, context_.sink);
  }
}

// Leaves hooks as they are, since one of them may be what arms.
void ParameterChanges::look_again(bool shadow) {
  if (!watch_.look) return;
  if (shadow) watch_parameters();
  if (present_ || shadow) present_ = watch_.look(/*thoroughly=*/true);
  if (present_) context_.layout.used().mark_changed();
}

void ParameterChanges::leave_out_changed() {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    if (!is_cast(i) && !is_reshaped(i) && !is_rearranged(i)) continue;
    context_.layout.used().mark_changed();
    context_.layout.leave_out(i);
  }
}

bool ParameterChanges::is_visited_by(const VisitedNodes& visited) const {
  return std::any_of(hooks_.begin(), hooks_.end(),
                     [&](const GradHook& hook) { return hook.is_visited_by(visited); }) ||
         std::any_of(newcomers_.begin(), newcomers_.end(), [&](const Newcomer& newcomer) {
           return newcomer.hook.is_visited_by(visited);
         });
}

const at::Tensor& ParameterChanges::newcomer_came(size_t newcomer, bool has_gradient) {
  if (has_gradient) newcomers_[newcomer].used = true;
  return newcomers_[newcomer].tensor;
}

ParameterChanges::Agreement ParameterChanges::agree(bool late, int64_t step) {
  const BucketLayout& layout = context_.layout;
  std::vector<ParameterState> states;
  bool replans = present_.has_value();
  for (size_t i = 0; i < hooks_.size(); ++i) {
    states.push_back({layout.infos()[i].requires_grad,
                      layout.used().used_here(static_cast<int64_t>(i)), parameter(i).scalar_type(),
                      parameter(i).grad_dtype().value_or(parameter(i).scalar_type()),
                      is_moved(i) && !is_reshaped(i)});
    replans = replans || is_reshaped(i) || is_rearranged(i);
  }
  AgreedStates agreed = agree_on_states(context_.communicator, layout.device(), layout.infos(),
                                        states, replans && !late, context_.area);
  if (agreed.replans) return replan(late);
  return apply_states(states, std::move(agreed), step);
}

ParameterChanges::Agreement ParameterChanges::apply_states(
    const std::vector<ParameterState>& states, AgreedStates agreed, int64_t step) {
  compare_moved_values(agreed.moved, step);
  BucketLayout& layout = context_.layout;
  std::vector<ParameterInfo>& infos = layout.infos();
  std::vector<int64_t> order;
  std::vector<bool> is_ordered(infos.size(), false);
  for (const int64_t index : layout.order()) {
    if (!infos[static_cast<size_t>(index)].requires_grad) continue;
    order.push_back(index);
    is_ordered[static_cast<size_t>(index)] = true;
  }
  Agreement agreement;
  agreement.used = std::move(agreed.used);
  for (size_t i = infos.size(); i-- > 0;) {
    infos[i].dtype = states[i].dtype;
    infos[i].grad_dtype.reset();
    if (states[i].gradient_dtype != states[i].dtype) infos[i].grad_dtype = states[i].gradient_dtype;
    const bool is_held = layout.place_of(i).is_planned() || layout.is_excluded(i);
    if (!infos[i].requires_grad || is_held) continue;
    agreement.left_out.push_back(static_cast<int64_t>(i));
    if (!is_ordered[i]) order.push_back(static_cast<int64_t>(i));
  }
  layout.set_order(std::move(order));
  return agreement;
}

// Compares the parameters that lie elsewhere than before on some rank.
void ParameterChanges::compare_moved_values(const std::vector<bool>& moved, int64_t step) {
  std::vector<size_t> compared;
  for (size_t i = 0; i < moved.size(); ++i)
    if (moved[i]) compared.push_back(i);
  if (compared.empty() || storages_.empty()) return;
  const int64_t world = context_.communicator.world();
  const c10::Device device = context_.layout.device();
  const auto count = static_cast<int64_t>(compared.size());
  at::Tensor hashes = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const size_t index = compared[static_cast<size_t>(i)];
    hashes.mutable_data_ptr<int64_t>()[i] = hash_of_samples(parameter(index), step);
    storages_[index] = storage_of(parameter(index));
  }
  hashes = hashes.to(device);
  const at::Tensor received = at::empty({world * count}, hashes.options());
  context_.communicator.all_gather({received}, {hashes}, "samples of parameters in other memory")
      .wait();
  const at::Tensor all = received.to(at::kCPU);
  const auto* theirs = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < world * count; ++i) {
    if (theirs[i] == theirs[i % count]) continue;
    storages_.clear();  // once is enough
    TORCH_WARN(error_text(
        context_.area,
        "got '" + context_.layout.infos()[compared[static_cast<size_t>(i % count)]].name +
            "' with other values on rank " + std::to_string(i / count) +
            " than on rank 0 since its .data was given other memory, expected the same values: "
            "gradients are averaged, and each rank goes on with a model of its own",
        where(), "Give all ranks the same values."));
    return;
  }
}

// Returns this rank's present parameters.
ModuleNow ParameterChanges::now(bool late) {
  if (watch_.look && !present_ && !late) present_ = watch_.look(/*thoroughly=*/true);
  if (present_ && !late) return *present_;
  ModuleNow now;
  now.parameters.tensors = context_.layout.parameters();
  for (const ParameterInfo& info : context_.layout.infos()) {
    now.parameters.names.push_back(info.name);
    now.parameters.sparse_gradient.push_back(info.sparse_gradient);
  }
  return now;
}

bool ParameterChanges::was_used(const at::Tensor& newcomer) const {
  for (const Newcomer& known : newcomers_)
    if (known.tensor.is_same(newcomer)) return known.used;
  return newcomer.grad().defined();
}

// Begins anew with the parameters that all ranks have now, or throws on all of them.
ParameterChanges::Agreement ParameterChanges::replan(bool late) {
  const BucketLayout& layout = context_.layout;
  ModuleNow now = this->now(late);
  const std::vector<ParameterInfo> infos =
      late ? layout.infos() : describe_parameters(now.parameters);
  const std::unordered_map<const at::TensorImpl*, int64_t> planned = places_of(layout.parameters());

  Agreement agreement;
  std::vector<int64_t> earlier;
  std::vector<ParameterState> states;
  for (size_t i = 0; i < infos.size(); ++i) {
    const at::Tensor& tensor = now.parameters.tensors[i];
    const auto found = planned.find(tensor.unsafeGetTensorImpl());
    earlier.push_back(found == planned.end() ? -1 : found->second);
    const bool is_new = earlier[i] < 0;
    const auto before = static_cast<size_t>(is_new ? 0 : earlier[i]);
    const bool used = is_new ? was_used(tensor) : layout.used().used_here(earlier[i]);
    states.push_back({infos[i].requires_grad, used, infos[i].dtype, infos[i].gradient_dtype()});
    const bool is_fresh = is_new || is_reshaped(before);
    if (is_fresh) agreement.fresh.push_back(static_cast<int64_t>(i));
    // A kept parameter that lies elsewhere is compared after the next backward.
    if (!storages_.empty())
      agreement.storages.push_back(is_fresh ? storage_of(tensor) : storages_[before]);
    if (infos[i].requires_grad && (is_new || !layout.place_of(before).is_planned()))
      agreement.left_out.push_back(static_cast<int64_t>(i));
  }
  const ParameterChange change{layout.infos(), infos, earlier, now.beside};
  check_same_change(context_.communicator, layout.device(), change, context_.area);
  check_replannable(change);
  agreement.used = agree_on_states(context_.communicator, infos.front().device, infos, states,
                                   false, context_.area)
                       .used;
  present_.reset();
  agreement.parameters = std::move(now.parameters);
  return agreement;
}

// Refuses changes that cannot be planned anew. All ranks have `change` alike, and throw alike.
void ParameterChanges::check_replannable(const ParameterChange& change) const {
  const auto refuse = [&](bool is_fine, const std::string& got, const char* next_step) {
    TORCH_CHECK_VALUE(is_fine, error_text(context_.area, got, where(), next_step));
  };
  refuse(context_.delivery.traits().may_replan,
         "got parameters that changed since they were sharded: " + describe_change(change),
         "Make the optimizer anew.");
  refuse(!change.present.empty(), "got a module that has lost its last parameter",
         "Use the module as it is: there is nothing to average.");
  for (const ParameterInfo& info : change.present) {
    const c10::Device device = context_.layout.device();
    refuse(info.device.type() == device.type(),
           "got '" + info.name + "' on " + info.device.str() + ", expected it on " + device.str() +
               " as the others",
           "Move it there before the forward.");
  }
}

// Broadcasts rank 0's values of parameters that ranks have made since they began with the same.
void ParameterChanges::adopt(const Agreement& agreement) {
  storages_ = agreement.storages;
  if (watch_.adopted) watch_.adopted();
  const std::vector<int64_t>& parameters = agreement.fresh;
  if (parameters.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const int64_t index : parameters)
    values.push_back(parameter(static_cast<size_t>(index)).detach().clone());
  context_.communicator.broadcast(values, 0, "values of new parameters").wait();
  std::string differs;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor here = parameter(static_cast<size_t>(parameters[i])).detach();
    // Equal values are not written, so that a graph that needs them may be used once more.
    if (at::equal(here, values[i])) continue;
    here.copy_(values[i]);
    if (differs.empty()) differs = context_.layout.infos()[static_cast<size_t>(parameters[i])].name;
  }
  if (differs.empty()) return;
  TORCH_WARN(error_text(context_.area,
                        "got '" + differs +
                            "' with other values than on rank 0, whose values it has from now on; "
                            "gradients of this step were taken at its own",
                        where(), "Set torch's seed on all ranks before you make layers."));
}

}  // namespace trireme
