#include <trireme/strategies/ddp/ddp.h>

#include <trireme/common/trace.h>
#include <trireme/grad/codes/senders.h>
#include <trireme/grad/plan_agreement.h>
#include <trireme/grad/whole_delivery.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

int64_t cap_bytes(double cap_mb) {
  TORCH_CHECK_VALUE(cap_mb > 0, error_text("ddp",
                                           "got a bucket cap of " + std::to_string(cap_mb) +
                                               " MiB, expected a positive number",
                                           {}, "Leave bucket_cap_mb out for the default of 25."));
  return std::max<int64_t>(1, static_cast<int64_t>(cap_mb * kMiB));
}

void check_module(const std::vector<ParameterInfo>& infos, RankOf where) {
  const bool trains =
      std::any_of(infos.begin(), infos.end(), [](const auto& info) { return info.requires_grad; });
  TORCH_CHECK(  // a RuntimeError, as torch's DDP raises
      trains, error_text("ddp", "got a module without trainable parameters, expected at least one",
                         where, "Use the module as it is: there is nothing to average."));
  for (const ParameterInfo& info : infos) {
    TORCH_CHECK_VALUE(info.device.type() == infos.front().device.type(),
                      error_text("ddp",
                                 "got parameters on several kinds of device, expected one: '" +
                                     infos.front().name + "' on " + infos.front().device.str() +
                                     " but '" + info.name + "' on " + info.device.str(),
                                 where, "Move the whole module to one kind of device."));
  }
}

}  // namespace

BucketCaps bucket_caps(const DdpOptions& options) {
  BucketCaps caps;
  if (!options.bucket_cap_mb_list.empty()) {
    TORCH_CHECK_VALUE(
        !options.bucket_cap_mb,
        error_text("ddp", "got both bucket_cap_mb and bucket_cap_mb_list, expected one", {},
                   "Leave one of them out."));
    for (const double cap_mb : options.bucket_cap_mb_list) caps.bytes.push_back(cap_bytes(cap_mb));
  } else if (options.bucket_cap_mb) {
    caps.bytes = {cap_bytes(*options.bucket_cap_mb)};
  } else {
    caps.bytes = {kFirstBucketBytes, kBucketBytes};
  }
  return caps;
}

Ddp::Ddp(ModuleTensors module, std::shared_ptr<Communicator> communicator,
         const DdpOptions& options)
    : communicator_(std::move(communicator)) {
  const std::vector<ParameterInfo> infos = describe_parameters(module.parameters);
  // The comparison of ranks comes first: a rank that refused its own module alone would leave the
  // others waiting.
  const c10::Device device = infos.empty() ? c10::Device(c10::kCPU) : infos.front().device;
  if (options.init_sync) {
    const std::string difference = difference_between_ranks(*communicator_, device, infos, "ddp");
    TORCH_CHECK(difference.empty(), difference);  // a RuntimeError, as torch's DDP raises
  }
  check_module(infos, communicator_->rank_of());
  if (options.init_sync) check_same_compression(*communicator_, options.compression);
  if (options.compression) check_compressible(infos, communicator_->rank_of());
  if (options.init_sync) {
    broadcast_module(module.parameters.tensors,
                     options.init_sync_buffers ? module.buffers : std::vector<at::Tensor>{},
                     /*root=*/0);
  }
  GradReducerOptions reducer_options;
  reducer_options.caps = bucket_caps(options);
  reducer_options.reduce_dtype = options.reduce_dtype;
  reducer_options.compares_moved_values = true;
  GradReducerParts parts;
  parts.communicator = communicator_;
  parts.trigger = trigger_;
  parts.delivery = std::make_shared<WholeDelivery>(trigger_, options.gradient_as_bucket_view);
  compression_ = options.compression;
  if (compression_) {
    auto transport = make_compressed_transport(communicator_, *compression_);
    if (transport) coder_ = &transport->coder();
    parts.transport = std::move(transport);
  }
  reducer_ = GradReducer::make(module.parameters, std::move(parts), reducer_options);
}

std::vector<KeptCodes> Ddp::kept_codes() const {
  if (coder_ == nullptr) return {};
  return {{coder_, reducer_->layout().infos(), reducer_->layout().parameters()}};
}

void Ddp::set_comm_hook(std::shared_ptr<CommHook> hook) {
  TORCH_CHECK(
      !compression_,
      error_text("ddp", "got a communication hook beside `compression`, expected one of the two",
                 communicator_->rank_of(), "Leave one of them out."));
  reducer_->set_comm_hook(std::move(hook));
}

void Ddp::lead(Ddp& inner) const {
  TORCH_CHECK_VALUE(
      !inner.compression_ || inner.compression_ == compression_,
      error_text("ddp",
                 "got compression " + to_string(*inner.compression_) +
                     " of a DistributedDataParallel inside of another one, which averages alone, "
                     "with " +
                     (compression_ ? to_string(*compression_) : std::string("none")),
                 communicator_->rank_of(), "Give the outer one the same compression."));
  inner.around_.push_back(forwards_);
}

// See [Note: one inside another] in ddp.h.
std::shared_ptr<Ddp::Forwards> Ddp::leading() const {
  for (auto outer = around_.rbegin(); outer != around_.rend(); ++outer)
    if (auto alive = outer->lock()) return alive;
  return forwards_;
}

std::unordered_map<const Ddp::Forwards*, int64_t>& Ddp::Forwards::running_here() {
  static thread_local std::unordered_map<const Forwards*, int64_t> running;
  return running;
}

void Ddp::before_forward() {
  const auto leader = leading();
  if (!leader->runs_here()) leader->trigger->before_forward();
}

void Ddp::after_forward(const std::vector<at::Tensor>& outputs, bool synchronize, bool all_found) {
  const auto leader = leading();
  if (!leader->runs_here()) leader->trigger->after_forward(outputs, synchronize, all_found);
}

void Ddp::sync_buffers(const std::vector<at::Tensor>& buffers, int64_t root) {
  TRIREME_TRACE("ddp.sync_buffers");
  const at::NoGradGuard no_grad;
  // The broadcast is no change that an earlier forward's graph would have to know of, so versions
  // are restored: otherwise two forwards of a BatchNorm model before one backward raise.
  std::vector<uint32_t> versions;
  for (const at::Tensor& buffer : buffers)
    versions.push_back(buffer.unsafeGetTensorImpl()->version_counter().current_version());
  communicator_->broadcast(buffers, root, "module buffers").wait();
  for (size_t i = 0; i < buffers.size(); ++i) {
    c10::VariableVersion counter =
        buffers[i].unsafeGetTensorImpl()->version_counter();  // shared, not copied
    counter.set_version(versions[i]);
  }
}

void Ddp::sync_module(const std::vector<at::Tensor>& buffers, int64_t root) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : reducer_->layout().parameters()) {
    const at::Tensor of_root = parameter.detach().clone(at::MemoryFormat::Contiguous);
    communicator_->broadcast({of_root}, root, "parameters after a join").wait();
    if (!at::equal(of_root, parameter)) parameter.copy_(of_root);
  }
  if (!buffers.empty()) broadcast_module({}, buffers, root);
}

void Ddp::broadcast_module(const std::vector<at::Tensor>& parameters,
                           const std::vector<at::Tensor>& buffers, int64_t root) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& parameter : parameters) tensors.push_back(parameter.detach());
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  communicator_->broadcast(tensors, root, "parameters and buffers").wait();
}

}  // namespace trireme
