#include <trireme/strategies/zero/zero.h>

#include <trireme/comm/host.h>
#include <trireme/common/language.h>
#include <trireme/common/resolved.h>
#include <trireme/common/trace.h>
#include <trireme/grad/codes/compressed_transport.h>
#include <trireme/grad/plan_agreement.h>
#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <utility>

// See [Note: the step of a sharded optimizer] in zero.h.

namespace trireme {
namespace {

constexpr Advice kUseDense = {.cpp = "Use sparse(false) in the options of its layer.",
                              .python = "Use sparse=False in its layer."};

at::Tensor flat(const at::Tensor& tensor, const ShardRange& range) {
  return tensor.view({-1}).narrow(0, range.begin, range.numel);
}

// Returns the rows of a sparse gradient that a shard has, `sizes[0]` of them from `first` on.
at::Tensor own_rows(const at::Tensor& gradient, int64_t first, at::IntArrayRef sizes) {
  const at::Tensor rows = gradient._indices().select(0, 0);
  const at::Tensor own =
      rows.ge(first).logical_and_(rows.lt(first + sizes.front())).nonzero().flatten();
  at::Tensor indices = gradient._indices().index_select(1, own);
  indices.select(0, 0).sub_(first);
  return at::_sparse_coo_tensor_unsafe(indices, gradient._values().index_select(0, own), sizes,
                                       gradient.options(), gradient.is_coalesced());
}

}  // namespace

Zero::Zero(NamedParameters parameters, std::shared_ptr<Communicator> communicator,
           const ZeroOptions& options)
    : parameters_(parameters.tensors),
      infos_(describe_parameters(parameters)),
      communicator_(std::move(communicator)),
      options_(options),
      samples_(static_cast<uint64_t>(communicator_->rank())) {
  const at::NoGradGuard no_grad;
  for (ParameterInfo& info : infos_) {
    info.strides.clear();  // they become contiguous
    if (options_.stage == 2) info.sparse_gradient = false;
  }
  const c10::Device device = infos_.empty() ? c10::Device(c10::kCPU) : infos_.front().device;
  const std::string difference = difference_between_ranks(*communicator_, device, infos_, "zero");
  TORCH_CHECK_VALUE(difference.empty(), difference);
  check_options();
  const int64_t number = agree_on_options();
  check_compression(parameters.sparse_gradient);
  plan_ = std::make_shared<const ShardPlan>(make_shard_plan(
      {infos_, communicator_->world(), options_.placement.value_or(ShardPlacement::kDim0)}));
  std::vector<at::Tensor> values;
  for (at::Tensor& parameter : parameters_) {
    if (!parameter.is_contiguous()) parameter.set_data(parameter.contiguous());
    values.push_back(parameter.detach());
  }
  communicator_->broadcast(values, 0, "parameters").wait();
  move_into_store();
  make_shards();
  snapshot_versions();
  take_samples();
  if (options_.stage == 1) return;
  parameters.sparse_gradient.assign(parameters_.size(), false);  // averages are dense
  GradReducerOptions reducing;
  reducing.area = "zero";
  reducing.bucket_prefix = "optimizer " + std::to_string(number) + ", ";
  trigger_ = std::make_shared<BackwardTrigger>(/*at_parameters=*/true);
  delivery_ = std::make_shared<ShardDelivery>(trigger_, OwnShards{plan_, communicator_->rank()},
                                              options_.fused_step);
  GradReducerParts parts;
  parts.communicator = communicator_;
  parts.trigger = trigger_;
  parts.delivery = delivery_;
  if (options_.compression) {
    auto coded = make_compressed_transport(communicator_, *options_.compression);
    if (coded) coder_ = &coded->coder();
    parts.transport = std::move(coded);
  }
  reducer_ = GradReducer::make(parameters, std::move(parts), reducing);
  watch_gradients();
}

void Zero::check_options() const {
  const RankOf where = communicator_->rank_of();
  TORCH_CHECK_VALUE(!infos_.empty(), error_text("zero", "got no parameters, expected at least one",
                                                where, "Pass model.parameters()."));
  TORCH_CHECK_VALUE(
      options_.stage == 1 || options_.stage == 2,
      error_text("zero", "got stage " + std::to_string(options_.stage) + ", expected 1 or 2", where,
                 "Stage 3 shards the parameters, too: use fully_shard."));
  for (const ParameterInfo& info : infos_) {
    TORCH_CHECK_VALUE(info.device == infos_.front().device,
                      error_text("zero",
                                 "got parameters on several devices, expected one: '" +
                                     infos_.front().name + "' on " + infos_.front().device.str() +
                                     " but '" + info.name + "' on " + info.device.str(),
                                 where, "Move all of them to one device."));
  }
}

// Compares what ranks were given, of which each may have to refuse it.
void Zero::check_compression(const std::vector<bool>& sparse) const {
  check_same_compression(*communicator_, options_.compression);
  if (!options_.compression) return;
  const RankOf where = communicator_->rank_of();
  check(*options_.compression);
  TORCH_CHECK_VALUE(
      options_.stage == 2,
      error_text("zero",
                 "got compression under stage 1, where DistributedDataParallel averages gradients",
                 where, "Give it to that, or use stage 2."));
  for (size_t i = 0; i < infos_.size(); ++i)
    if (sparse[i]) refuse_sparse(infos_[i].name, where);
}

std::vector<KeptCodes> Zero::kept_codes() const {
  if (coder_ == nullptr) return {};
  return {{coder_, reducer_->layout().infos(), reducer_->layout().parameters()}};
}

// Returns a number for this optimizer, by which ranks tell theirs apart.
int64_t Zero::agree_on_options() const {
  static std::atomic<int64_t> last_number{0};
  const std::vector<int64_t> own = {
      options_.stage, static_cast<int64_t>(options_.placement.value_or(ShardPlacement::kDim0)),
      options_.host_params ? 1 : 0, options_.fused_step ? 1 : 0};
  std::vector<int64_t> told = own;
  for (const int64_t option : own) told.push_back(-option);  // the maximum of which is the minimum
  told.push_back(last_number + 1);
  const at::Tensor transport = at::tensor(told, at::kLong).to(infos_.front().device);
  communicator_->all_reduce({transport}, ReduceOp::kMax, "options").wait();
  const auto numel = static_cast<int64_t>(own.size());
  const at::Tensor highest = transport.narrow(0, 0, numel);
  const at::Tensor lowest = transport.narrow(0, numel, numel).neg();
  TORCH_CHECK_VALUE(at::equal(highest, lowest),
                    error_text("zero",
                               "got options that differ between the ranks, expected one stage, "
                               "placement, host_params and fused_step; here stage " +
                                   std::to_string(options_.stage),
                               communicator_->rank_of(), "Pass the same on all ranks."));
  const int64_t agreed = transport[2 * numel].item<int64_t>();
  last_number = agreed;
  return agreed;
}

void Zero::move_into_store() {
  if (!options_.host_params || communicator_->world() == 1) return;
  std::string why_not = "they are on " + infos_.front().device.str();
  if (infos_.front().device.is_cpu()) {
    const int64_t bytes = HostStore::bytes_for(infos_, communicator_->world());
    SharedMemory memory;
    if (Host* host = communicator_->host()) memory = host->share_memory(bytes, "parameters");
    why_not = memory.why_not;
    if (memory.segment)
      store_ = HostStore::make(std::move(memory.segment), infos_, communicator_->rank_of());
  }
  if (!store_) {
    if (communicator_->rank() == 0)
      TORCH_WARN(error_text(
          "zero", "parameters stay private to each rank: " + why_not, communicator_->rank_of(),
          in_language({.cpp = "Each step gathers them. ZeroOptions::host_params = "
                              "false says that this is wanted.",
                       .python = "Each step gathers them. host_params=False says "
                                 "that this is wanted."})));
    return;
  }
  // Each owner touches the pages of its part first, so that they lie near it.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ShardRange& range = own(i);
    flat(store_->whole(static_cast<int64_t>(i)), range).copy_(flat(parameters_[i], range));
  }
  communicator_->barrier("parameters are in their store").wait();
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].set_data(store_->whole(static_cast<int64_t>(i)));
}

const ShardRange& Zero::own(size_t parameter) const {
  return plan_->of(static_cast<int64_t>(parameter), communicator_->rank());
}

void Zero::make_shards() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    places_.push_back(parameter.detach());
    const std::vector<int64_t> sizes = shard_sizes(infos_[i], own(i), plan_->placement);
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
  constexpr auto kNumel = static_cast<int64_t>(sizeof(Flags) / sizeof(int64_t));
  const at::Tensor own = at::from_blob(&flags, {kNumel}, at::kLong);
  const at::Tensor highest = own.clone().to(infos_.front().device);
  communicator_->recover();
  communicator_->all_reduce({highest}, ReduceOp::kMax, label).wait();
  own.copy_(highest);
  return flags;
}

bool Zero::is_moved(size_t index) const {
  return parameters_[index].const_data_ptr() != places_[index].const_data_ptr();
}

bool Zero::is_fit(size_t index) const {
  const at::Tensor& parameter = parameters_[index];
  const ParameterInfo& info = infos_[index];
  return parameter.sizes() == at::IntArrayRef(info.sizes) &&
         parameter.scalar_type() == info.dtype && parameter.device() == info.device;
}

bool Zero::has_fit_gradient(size_t index) const {
  const at::Tensor& grad = parameters_[index].grad();
  const bool is_sparse = grad.defined() && grad.layout() == at::kSparse && options_.stage == 1;
  return grad.defined() && (is_sparse || grad.layout() == at::kStrided) &&
         grad.device() == infos_[index].device &&
         grad.sizes() == at::IntArrayRef(infos_[index].sizes);
}

Zero::Flags Zero::look_at_parameters() const {
  Flags flags;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (!is_fit(i)) flags.unfit_parameter = index;
    if (is_moved(i)) flags.moved_parameter = index;
  }
  const std::vector<int64_t> changed = changed_outside();
  flags.changed_parameter = changed.empty() ? written_unseen() : changed.front();
  return flags;
}

void Zero::refuse(const Flags& flags) {
  const auto refuse_one = [&](int64_t index, const std::string& before, const char* after,
                              const char* next_step) {
    if (index < 0) return;
    const std::string& name = infos_[static_cast<size_t>(index)].name;
    TORCH_CHECK(false, error_text("zero", before + "'" + name + "'" + after,
                                  communicator_->rank_of(), next_step));
  };
  // A write is reported once.
  if (flags.changed_parameter >= 0) {
    snapshot_versions();
    take_samples();
  }
  refuse_one(flags.unfit_parameter, "got ",
             " with another shape, dtype or device than when the optimizer was made",
             "Make the optimizer anew.");
  refuse_one(
      flags.changed_parameter, "parameter ", " was changed outside step()",
      in_language({.cpp = "All ranks write one memory: do it while the guard `auto writing = "
                          "optimizer.writing();` lives, all with the same values.",
                   .python = "All ranks write one memory: do it inside `with "
                             "trireme.writing(optimizer):`, all with the same values."}));
  refuse_one(flags.unfit_gradient, "got a gradient of ",
             ", expected it dense and of its parameter's shape", in_language(kUseDense));
  refuse_one(
      flags.changed_gradient, "the gradient of ",
      " is not the average over the ranks: it was changed, replaced, or accumulated under "
      "no_sync()",
      in_language(
          {.cpp = "Each rank sees its shards only: clip with optimizer.clip_grad_norm_() or "
                  "trireme::clip_grad_norm_(), scale the loss instead of gradients, end an "
                  "accumulation with a backward after no_sync(), and call zero_grad() "
                  "after a backward that failed.",
           .python = "Each rank sees its shards only: clip with trireme.clip_grad_norm_, scale "
                     "the loss instead of gradients, end an accumulation with a backward outside "
                     "no_sync(), call zero_grad() after a backward that failed, and run a pipeline "
                     "by a schedule of trireme.pipelining instead of torch's."}));
  TORCH_CHECK(
      flags.least_factor <= -flags.minus_most_factor,
      error_text("zero",
                 "gradients were multiplied by factors that differ between the ranks, as torch's "
                 "clip_grad_norm_ does, which sees the norm of a rank's shards only",
                 communicator_->rank_of(),
                 "Clip with optimizer.clip_grad_norm_(max_norm), and call zero_grad() before the "
                 "next backward."));
}

bool Zero::begin_step(const ZeroStep& step) {
  TRIREME_TRACE("zero.begin_step");
  Flags flags = look_at_parameters();
  flags.found_inf = step.found_inf ? 1 : 0;
  scaler_wrote_ = step.scaler_writes.has_value();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].grad().defined() && !has_fit_gradient(i))
      flags.unfit_gradient = static_cast<int64_t>(i);
  }
  if (delivery_) {
    const std::vector<int64_t> changed =
        delivery_->changed_gradients(step.scaler_writes.value_or(0));
    if (!changed.empty()) flags.changed_gradient = changed.front();
    const FactorRange factor = gradient_factor();
    flags.least_factor = in_order(factor.least);
    flags.minus_most_factor = -in_order(factor.most);
  }
  flags = meet(flags, "step gate: before writing");
  refuse(flags);
  samples_.clear();
  if (delivered_) delivered_->clear();
  const at::NoGradGuard no_grad;
  agree_on_moved(flags, Moved::kSameValues);
  copy_back();
  steps_ = flags.found_inf == 0;
  for (size_t i = 0; steps_ && i < parameters_.size(); ++i) {
    shards_[i].mutable_grad() = has_fit_gradient(i) ? own_gradient(i) : at::Tensor();
    shards_[i].set_requires_grad(parameters_[i].requires_grad());
  }
  return steps_;
}

// Returns this rank's part of a parameter's gradient, shaped as the shard, over the memory of a
// contiguous gradient; of a sparse one copies of rows.
at::Tensor Zero::own_gradient(size_t index) const {
  at::Tensor grad = parameters_[index].grad();
  if (grad.is_sparse()) {
    if (own(index).numel == 0) return {};  // no optimizer has this shard
    const int64_t row = infos_[index].numel / grad.size(0);
    return own_rows(grad, own(index).begin / row, shards_[index].sizes());
  }
  if (!grad.is_contiguous() || !is_resolved(grad)) grad = resolved(grad).contiguous();
  return range_of(grad, shards_[index].sizes(), shards_[index].strides(),
                  grad.storage_offset() + own(index).begin);
}

void Zero::end_step() {
  TRIREME_TRACE("zero.end_step");
  const at::NoGradGuard no_grad;
  ++step_;
  for (const at::Tensor& shard : shards_) shard.mutable_grad().reset();
  if (steps_) HostStore::bump_versions(parameters_);
  snapshot_versions();  // before a wait that may throw
  if (store_) {
    communicator_->barrier("step gate: written").wait();
    store_->publish_version(static_cast<uint64_t>(step_));
  } else if (steps_) {
    gather_shards();
    snapshot_versions();
  }
  take_samples();
  // A GradScaler has written to the zeros that other ranks own.
  if (delivery_ && std::exchange(scaler_wrote_, false)) delivery_->keep_own_gradients();
  if (reducer_) reducer_->notice_changes();
}

void Zero::abandon_step(const std::string& reason) noexcept {
  for (const at::Tensor& shard : shards_) shard.mutable_grad().reset();
  try {
    drop_writes();
    snapshot_versions();  // the reason is told, that is enough
    const RankOf where = communicator_->rank_of();
    const std::string what = std::string("step ") + std::to_string(step_) + " was abandoned";
    if (where.world > 1) communicator_->announce_failure(error_text("zero", what, where, reason));
  } catch (...) {  // out of memory: the peers see their deadline instead
  }
}

// Gathers private parameters. Each owner broadcasts its parts from their places to the same places;
// small parts go together, by way of a buffer.
void Zero::gather_shards() {
  constexpr int64_t kSmallBytes = int64_t{1} << 20;
  std::vector<Pending> pending;
  for (int64_t rank = 0; rank < communicator_->world(); ++rank) {
    const std::string label = "parameters of rank " + std::to_string(rank);
    std::vector<at::Tensor> small;
    for (size_t i = 0; i < places_.size(); ++i) {
      at::Tensor part = flat(places_[i], plan_->of(static_cast<int64_t>(i), rank));
      if (static_cast<int64_t>(part.nbytes()) < kSmallBytes) {
        small.push_back(std::move(part));
      } else {
        pending.push_back(communicator_->broadcast({std::move(part)}, rank, label));
      }
    }
    pending.push_back(communicator_->broadcast(std::move(small), rank, label));
  }
  for (Pending& one : pending) one.wait();
}

// Copies parameters that the user put elsewhere (load_state_dict(assign=True), p.data =) back to
// their places. Autograd forgets the node of a parameter that was cast or set_(), as torch::load
// does, and with it the hook that brings gradients here.
void Zero::copy_back() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_moved(i)) continue;
    at::Tensor& parameter = parameters_[i];
    const at::Tensor moved = parameter.detach().contiguous();
    const ShardRange range = store_ ? own(i) : ShardRange{0, infos_[i].numel};
    flat(places_[i], range).copy_(flat(moved, range));
    parameter.set_data(places_[i]);
  }
  own_memory_.clear();
  if (reducer_) reducer_->notice_changes();
}

void Zero::set_synchronize(bool synchronize) {
  if (trigger_) trigger_->set_synchronize(synchronize);
}

GradNormPart Zero::gradients(const std::vector<int64_t>& parameters) const {
  GradNormPart part;
  part.device = infos_.front().device;
  if (reducer_) {
    delivery_->finalize_sums();
    part.sharded_over = communicator_;
  }
  for (const int64_t parameter : parameters) {
    const auto i = static_cast<size_t>(parameter);
    if (!has_fit_gradient(i)) continue;
    if (delivered_) delivered_->read(i, {});  // all ranks scale what this returns
    at::Tensor grad = reducer_ ? own_gradient(i) : parameters_[i].grad();
    if (grad.is_sparse()) {
      const at::NoGradGuard no_grad;
      parameters_[i].mutable_grad() = grad = grad.coalesce();
      grad = grad._values();
    }
    part.gradients.push_back(std::move(grad));
  }
  return part;
}

void Zero::zero_grad(bool set_to_none) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> foreign;
  if (delivery_) foreign = delivery_->changed_gradients();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& grad = parameters_[i].mutable_grad();
    shards_[i].mutable_grad().reset();
    if (set_to_none || !grad.defined()) {
      grad.reset();
      continue;
    }
    // The zeros that other ranks own take no memory as long as they are not written.
    const bool is_ours =
        reducer_ && !std::binary_search(foreign.begin(), foreign.end(), static_cast<int64_t>(i));
    is_ours ? own_gradient(i).zero_() : grad.detach_().zero_();
  }
  if (!reducer_) return;
  delivered_->clear();
  delivery_->drop_set_aside();
  reducer_->notice_changes();
}

void Zero::retire() {
  if (reducer_)
    for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  coder_ = nullptr;
  reducer_.reset();
  delivery_.reset();
  trigger_.reset();
  parameters_.clear();
  places_.clear();
  shards_.clear();
  own_memory_.clear();
  store_.reset();
}

}  // namespace trireme
