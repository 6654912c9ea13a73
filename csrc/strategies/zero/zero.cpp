#include <trireme/strategies/zero/zero.h>

#include <trireme/common/trace.h>
#include <trireme/grad/plan_agreement.h>
#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <utility>

// See [Note: the step of a sharded optimizer] in zero.h.

namespace trireme {
namespace {

constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;
constexpr int64_t kBucketBytes = int64_t{25} << 20;

at::Tensor flat(const at::Tensor& tensor, const ShardRange& range) {
  return tensor.view({-1}).narrow(0, range.begin, range.numel);
}

}  // namespace

Zero::Zero(NamedParameters parameters, std::shared_ptr<Communicator> communicator,
           const ZeroOptions& options)
    : parameters_(parameters.tensors),
      infos_(describe_parameters(parameters)),
      communicator_(std::move(communicator)),
      options_(options) {
  const at::NoGradGuard no_grad;
  const c10::Device device = infos_.empty() ? c10::Device(c10::kCPU) : infos_.front().device;
  check_same_parameters(*communicator_, device, infos_, "zero");
  check_options();
  plan_ = std::make_shared<const ShardPlan>(
      make_shard_plan({infos_, communicator_->world(), options_.placement}));
  std::vector<at::Tensor> values;
  for (at::Tensor& parameter : parameters_) {
    if (!parameter.is_contiguous()) parameter.set_data(parameter.contiguous());
    values.push_back(parameter.detach());
  }
  communicator_->broadcast(values, 0, "parameters").wait();
  move_into_store();
  make_shards();
  if (options_.stage == 1) return;
  GradReducerOptions reducing;
  reducing.caps = {{kFirstBucketBytes, kBucketBytes}};
  reducing.area = "zero";
  reducing.shards = plan_;
  reducing.arms_at_parameters = true;
  reducing.defers_sums = options_.fused_step;
  parameters.tensors = parameters_;
  reducer_ = GradReducer::make(std::move(parameters), communicator_, std::move(reducing));
}

void Zero::check_options() const {
  const RankOf where = communicator_->rank_of();
  TORCH_CHECK_VALUE(!infos_.empty(),
                    error_text("zero", "got no parameters, expected at least one", where,
                               "Pass model.parameters()."));
  TORCH_CHECK_VALUE(options_.stage == 1 || options_.stage == 2,
                    error_text("zero",
                               "got stage " + std::to_string(options_.stage) + ", expected 1 or 2",
                               where, "Stage 3 shards the parameters, too: use fully_shard."));
  for (const ParameterInfo& info : infos_) {
    TORCH_CHECK_VALUE(info.device == infos_.front().device,
                      error_text("zero",
                                 "got parameters on several devices, expected one: '" +
                                     infos_.front().name + "' on " + infos_.front().device.str() +
                                     " but '" + info.name + "' on " + info.device.str(),
                                 where, "Move all of them to one device."));
    TORCH_CHECK_VALUE(options_.stage == 1 || !info.sparse_gradient,
                      error_text("zero", "got '" + info.name + "' with sparse gradients", where,
                                 "Use sparse=False, or stage=1."));
  }
}

void Zero::move_into_store() {
  if (!options_.host_params || communicator_->world() == 1) return;
  std::string why_not = "they are on " + infos_.front().device.str();
  if (infos_.front().device.is_cpu()) {
    const int64_t bytes = HostStore::bytes_for(infos_, communicator_->world());
    SharedMemory memory = communicator_->share_memory(bytes, "parameters");
    why_not = memory.why_not;
    if (memory.segment)
      store_ = HostStore::make(std::move(memory.segment), infos_, communicator_->rank_of());
  }
  if (!store_) {
    if (communicator_->rank() == 0)
      TORCH_WARN(error_text("zero", "parameters stay private to each rank: " + why_not,
                            communicator_->rank_of(),
                            "Each step gathers them. host_params=False says that this is wanted."));
    return;
  }
  // Who owns a part touches its pages first, so that they lie near it.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ShardRange& range = own(i);
    flat(store_->whole(static_cast<int64_t>(i)), range).copy_(flat(parameters_[i], range));
  }
  communicator_->barrier("parameters are in their store").wait();
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].set_data(store_->whole(static_cast<int64_t>(i)));
  store_->snapshot_versions(parameters_);
}

const ShardRange& Zero::own(size_t parameter) const {
  return plan_->of(static_cast<int64_t>(parameter), communicator_->rank());
}

void Zero::make_shards() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    places_.push_back(parameter.detach());
    const std::vector<int64_t> sizes = shard_sizes(infos_[i], own(i), options_.placement);
    at::Tensor shard;
    if (store_) {
      shard = store_->shard(static_cast<int64_t>(i), own(i), sizes);
    } else {
      const at::Tensor& whole = places_.back();
      auto* data = static_cast<char*>(whole.mutable_data_ptr()) +
                   own(i).begin * static_cast<int64_t>(whole.element_size());
      shard = at::from_blob(data, sizes, [whole](void*) {}, whole.options());
    }
    shards_.push_back(shard.set_requires_grad(parameter.requires_grad()));
  }
}

Zero::Flags Zero::meet(Flags flags, const char* label) {
  const auto on_device = at::TensorOptions().device(infos_.front().device);
  at::Tensor highest =
      at::tensor({flags.changed_parameter, flags.changed_gradient, flags.found_inf}, at::kLong)
          .to(on_device);
  communicator_->recover();
  communicator_->all_reduce({highest}, ReduceOp::kMax, label).wait();
  highest = highest.cpu();
  const auto* found = highest.const_data_ptr<int64_t>();
  return {found[0], found[1], found[2]};
}

Zero::Flags Zero::look_at_parameters() const {
  Flags flags;
  if (!store_) return flags;
  const std::vector<int64_t> changed = store_->changed_outside(parameters_);
  if (!changed.empty()) flags.changed_parameter = changed.front();
  return flags;
}

void Zero::refuse_changed(const Flags& flags) const {
  const RankOf where = communicator_->rank_of();
  if (flags.changed_parameter >= 0) {
    const std::string& name = infos_[static_cast<size_t>(flags.changed_parameter)].name;
    store_->snapshot_versions(parameters_);  // it is said once
    TORCH_CHECK(false, error_text("zero", "parameter '" + name + "' was changed outside step()",
                                  where,
                                  "All ranks write one memory: do it inside `with "
                                  "trireme.writing(optimizer):`, all with the same values."));
  }
  if (flags.changed_gradient < 0) return;
  const std::string& name = infos_[static_cast<size_t>(flags.changed_gradient)].name;
  TORCH_CHECK(
      false,
      error_text("zero",
                 "the gradient of '" + name +
                     "' is not the average over the ranks: it was changed, replaced, or "
                     "accumulated under no_sync()",
                 where,
                 "Each rank sees its shards only: clip with trireme.clip_grad_norm_, scale the "
                 "loss instead of gradients, and end an accumulation with a backward outside "
                 "no_sync()."));
}

bool Zero::begin_step(const ZeroStep& step) {
  TRIREME_TRACE("zero.begin_step");
  Flags flags = look_at_parameters();
  flags.found_inf = step.found_inf ? 1 : 0;
  scaler_wrote_ = step.scaler_writes > 0;
  if (reducer_) {
    const std::vector<int64_t> changed = reducer_->changed_gradients(step.scaler_writes);
    if (!changed.empty()) flags.changed_gradient = changed.front();
  }
  flags = meet(flags, "step gate: before writing");
  refuse_changed(flags);
  const at::NoGradGuard no_grad;
  settle_storages();
  if (flags.found_inf > 0) return false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& grad = shards_[i].mutable_grad();
    grad = parameters_[i].grad().defined() ? own_gradient(i) : at::Tensor();
    shards_[i].set_requires_grad(parameters_[i].requires_grad());
  }
  return true;
}

// As its shard is shaped, over the memory of the parameter's gradient.
at::Tensor Zero::own_gradient(size_t index) const {
  at::Tensor grad = parameters_[index].grad();
  TORCH_CHECK_VALUE(!grad.is_sparse(),
                    error_text("zero", "got a sparse gradient of '" + infos_[index].name + "'",
                               communicator_->rank_of(), "Use sparse=False in its layer."));
  if (!grad.is_contiguous()) grad = grad.contiguous();
  return range_of(grad, shards_[index].sizes(), shards_[index].strides(),
                  grad.storage_offset() + own(index).begin);
}

void Zero::end_step() {
  TRIREME_TRACE("zero.end_step");
  const at::NoGradGuard no_grad;
  ++step_;
  for (const at::Tensor& shard : shards_) shard.mutable_grad().reset();
  if (store_) {
    HostStore::bump_versions(parameters_);
    communicator_->barrier("step gate: written").wait();
    store_->publish_version(static_cast<uint64_t>(step_));
    store_->snapshot_versions(parameters_);
  } else {
    gather_shards();
  }
  // A GradScaler has written zeros to what others own.
  if (reducer_ && std::exchange(scaler_wrote_, false)) reducer_->keep_own_gradients();
}

void Zero::abandon_step(const std::string& reason) noexcept {
  for (const at::Tensor& shard : shards_) shard.mutable_grad().reset();
  try {
    communicator_->announce_failure(error_text("zero",
                                               "step " + std::to_string(step_) + " was abandoned",
                                               communicator_->rank_of(), reason));
  } catch (...) {  // out of memory: the peers see their deadline instead
  }
}

// Private parameters: one padded run of shards per dtype.
void Zero::gather_shards() {
  const int64_t world = communicator_->world();
  if (world == 1) return;
  std::map<at::ScalarType, std::vector<size_t>> by_dtype;
  for (size_t i = 0; i < parameters_.size(); ++i) by_dtype[infos_[i].dtype].push_back(i);
  for (const auto& [dtype, indices] : by_dtype) {
    std::vector<int64_t> numel(static_cast<size_t>(world), 0);
    for (const size_t i : indices)
      for (int64_t rank = 0; rank < world; ++rank)
        numel[static_cast<size_t>(rank)] += plan_->of(static_cast<int64_t>(i), rank).numel;
    const int64_t longest = *std::max_element(numel.begin(), numel.end());
    const auto options = parameters_[indices.front()].options().requires_grad(false);
    const at::Tensor mine = at::empty({longest}, options);
    const at::Tensor all = at::empty({world * longest}, options);
    int64_t at = 0;
    for (const size_t i : indices) {
      mine.narrow(0, at, own(i).numel).copy_(flat(parameters_[i].detach(), own(i)));
      at += own(i).numel;
    }
    communicator_->all_gather({all}, {mine}, "parameters").wait();
    for (int64_t rank = 0; rank < world; ++rank) {
      at = rank * longest;
      for (const size_t i : indices) {
        const ShardRange& range = plan_->of(static_cast<int64_t>(i), rank);
        if (rank != communicator_->rank())
          flat(parameters_[i], range).copy_(all.narrow(0, at, range.numel));
        at += range.numel;
      }
    }
  }
}

// What the user put elsewhere (load_state_dict(assign=True), p.data =) comes back into the store.
void Zero::settle_storages() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& parameter = parameters_[i];
    if (parameter.const_data_ptr() == places_[i].const_data_ptr()) continue;
    TORCH_CHECK_VALUE(parameter.sizes() == at::IntArrayRef(infos_[i].sizes) &&
                          parameter.scalar_type() == infos_[i].dtype &&
                          parameter.device() == infos_[i].device,
                      error_text("zero",
                                 "got '" + infos_[i].name +
                                     "' with another shape, dtype or device than when the "
                                     "optimizer was made",
                                 communicator_->rank_of(), "Make the optimizer anew."));
    const at::Tensor moved = parameter.detach().contiguous();
    const ShardRange range = store_ ? own(i) : ShardRange{0, infos_[i].numel};
    flat(places_[i], range).copy_(flat(moved, range));
    parameter.set_data(places_[i]);
  }
}

void Zero::begin_writing() {
  const Flags flags = meet(look_at_parameters(), "step gate: before writing");
  refuse_changed(flags);
}

void Zero::end_writing() {
  const at::NoGradGuard no_grad;
  settle_storages();
  communicator_->barrier("step gate: written").wait();
  if (store_) store_->snapshot_versions(parameters_);
}

void Zero::set_synchronize(bool synchronize) {
  if (reducer_) reducer_->set_synchronize(synchronize);
}

GradNormPart Zero::gradients(const std::vector<int64_t>& parameters) const {
  GradNormPart part;
  part.device = infos_.front().device;
  if (reducer_) {
    reducer_->settle_sums();
    part.sharded_over = communicator_;
    // One write: GradScaler.unscale_, by the same factor on all ranks.
    const std::vector<int64_t> changed = reducer_->changed_gradients(/*allowed=*/1);
    if (!changed.empty()) refuse_changed({-1, changed.front(), 0});
  }
  for (const int64_t parameter : parameters) {
    const auto i = static_cast<size_t>(parameter);
    if (!parameters_[i].grad().defined()) continue;
    part.gradients.push_back(reducer_ ? own_gradient(i) : parameters_[i].grad());
  }
  return part;
}

void Zero::accept_gradients() {
  if (reducer_) reducer_->accept_gradients();
}

void Zero::zero_grad() {
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  for (const at::Tensor& shard : shards_) shard.mutable_grad().reset();
  if (reducer_) reducer_->drop_set_aside();
}

}  // namespace trireme
