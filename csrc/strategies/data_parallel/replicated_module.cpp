#include <trireme/strategies/data_parallel/replicated_module.h>

#include <trireme/common/error.h>
#include <trireme/common/intra_op_threads.h>
#include <trireme/module/meets_ranks.h>
#include <trireme/strategies/data_parallel/chunk_plan.h>
#include <trireme/strategies/data_parallel/core_groups.h>
#include <trireme/strategies/data_parallel/messages.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace trireme {
namespace {

// Returns one of the module's tensors, which are all on its device; undefined if it has none.
at::Tensor any_tensor_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  if (tensors.empty()) return {};
  for (const at::Tensor& tensor : tensors)
    TORCH_CHECK_VALUE(
        tensor.device() == tensors.front().device(),
        error_text(kDataParallelArea,
                   std::string("got a module on ") + tensors.front().device().str() + " and " +
                       tensor.device().str() + ", expected one device",
                   {}, "Move it to the device of the first replica: net->to(device)."));
  return tensors.front();
}

c10::Device device_holding(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.device() : c10::Device(c10::kCPU);
}

void check_options(const DataParallelOptions& options) {
  const auto got = static_cast<int64_t>(options.devices.size());
  TORCH_CHECK_VALUE(options.replicas >= 0,
                    error_text(kDataParallelArea,
                               std::string("got ") + std::to_string(options.replicas) +
                                   " replicas, expected at least 1, or 0 for a number that suits",
                               {}, "Say how many parts a batch has."));
  TORCH_CHECK_VALUE(
      options.replicas == 0 || got == 0 || options.replicas == got,
      error_text(kDataParallelArea,
                 std::string("got ") + std::to_string(options.replicas) + " replicas and " +
                     std::to_string(got) + " devices, expected as many",
                 {}, "Name one device per replica, or none."));
  TORCH_CHECK_VALUE(
      options.weights.empty() || !options.auto_balance,
      error_text(kDataParallelArea, "got weights and auto_balance, expected one of them", {},
                 "Leave the weights out: balance finds them."));
  if (!options.weights.empty())
    static_cast<void>(weighted_chunks(1, options.weights));  // throws for bad ones
}

void refuse_nesting(const torch::nn::Module& module) {
  for (const auto& item : module.named_modules())
    TORCH_CHECK_VALUE(dynamic_cast<const ReplicatedModule*>(item.value().get()) == nullptr,
                      error_text(kDataParallelArea,
                                 std::string("got a DataParallel at '") + item.key() +
                                     "' in the module, expected plain modules",
                                 {}, "Wrap the outermost module alone."));
}

// Refuses layers that communicate with other ranks: each replica would do so by itself.
void refuse_meeting(const torch::nn::Module& module) {
  const std::string found = meeting_of_ranks(module, 0);
  TORCH_CHECK_VALUE(found.empty(),
                    error_text(kDataParallelArea, "got " + found + ", expected plain modules", {},
                               "Run ranks under DDP, or keep BatchNorm."));
}

}  // namespace

c10::Device existing_device(c10::Device device) {
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  const bool known = c10::impl::hasDeviceGuardImpl(device.type());
  const int64_t count =
      known ? int64_t{c10::impl::VirtualGuardImpl(device.type()).deviceCount()} : 0;
  TORCH_CHECK_VALUE(
      device.index() < count && count > 0,
      error_text(kDataParallelArea,
                 std::string("got the device ") + device.str() + ", expected one of the " +
                     std::to_string(count) + " of its kind here",
                 {}, "Name devices that exist, or torch::kCPU."));
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

ReplicatedModule::ReplicatedModule(std::shared_ptr<torch::nn::Module> module,
                                   DataParallelOptions options)
    : inner_(std::move(module)), options_(std::move(options)) {
  check_options(options_);
  refuse_nesting(*inner_);
  for (c10::Device& device : options_.devices) device = existing_device(device);
  if (options_.output_device) options_.output_device = existing_device(*options_.output_device);
  register_module("module", inner_);
  replicate();
}

void ReplicatedModule::choose_devices() {
  probe_ = any_tensor_of(*inner_);
  const c10::Device home = device_holding(probe_);
  devices_ = options_.devices;
  if (devices_.empty()) {
    int64_t count = options_.replicas;
    if (count == 0) count = static_cast<int64_t>(options_.weights.size());
    if (count == 0) count = home.is_cpu() ? default_replicas(at::get_num_threads()) : 1;
    devices_.assign(static_cast<size_t>(count), home);
  }
  for (const c10::Device device : devices_)
    TORCH_CHECK_VALUE(device.type() == devices_.front().type(),
                      error_text(kDataParallelArea,
                                 std::string("got replicas on ") + devices_.front().str() +
                                     " and " + device.str() + ", expected one kind of device",
                                 {}, "Name devices of one kind."));
  TORCH_CHECK_VALUE(home == devices_.front(),
                    error_text(kDataParallelArea,
                               std::string("got a module on ") + home.str() + ", expected it on " +
                                   devices_.front().str() + ", the device of the first replica",
                               {}, "Move it there, or name its own device first."));
  TORCH_CHECK_VALUE(options_.weights.empty() || options_.weights.size() == devices_.size(),
                    error_text(kDataParallelArea,
                               std::string("got ") + std::to_string(options_.weights.size()) +
                                   " weights, expected one for each of " +
                                   std::to_string(devices_.size()) + " replicas",
                               {}, "Give one share of the batch per replica."));
}

void ReplicatedModule::replicate() {
  choose_devices();
  fork_guard_ = {};
  clones_ = {};
  replicas_.reset();
  pool_.reset();
  if (devices_.size() == 1) return;
  refuse_meeting(*inner_);
  ModuleClones clones = clone_module(*inner_, devices_);
  pool_ = std::make_shared<WorkerPool>(devices_,
                                       intra_op_threads_of(at::get_num_threads(), devices_.size()));
  pool_id_ = pool_->id();
  replicas_ = std::make_shared<Replicas>(
      std::move(clones.tensors), pool_,
      ReplicasOptions{options_.weights, options_.auto_balance, output_device()});
  clones_ = std::move(clones);
}

std::unique_lock<std::mutex> ReplicatedModule::take_turn() {
  TORCH_CHECK_VALUE(WorkerPool::served_here() == nullptr || WorkerPool::served_here() != pool_id_,
                    error_text(kDataParallelArea,
                               "got a forward within one of the same DataParallel or its backward, "
                               "expected one around it",
                               {}, "Call the module itself there."));
  return std::unique_lock(turn_);
}

bool ReplicatedModule::get_ready() {
  // Throws if other devices were asked for. A forked process has none of the threads.
  if (device_holding(probe_) != devices_.front() || fork_guard_.in_child()) replicate();
  if (!replicas_) return true;
  follow_training(clones_);
  pool_->start();
  return false;
}

int64_t ReplicatedModule::rows_of(const at::Tensor* first) const {
  if (first == nullptr) return 1;
  const int64_t rank = first->dim();
  // A dim out of range is refused, with a full message, when the tensor is cut.
  return -rank <= options_.dim && options_.dim < rank ? first->size(options_.dim) : 1;
}

std::shared_ptr<ReplicaPass> ReplicatedModule::begin(int64_t rows) {
  return replicas_->begin(rows);
}

torch::nn::Module& ReplicatedModule::replica(const ReplicaPass& pass, size_t position) const {
  return *clones_.modules[pass.chunks()[position].replica];
}

at::Tensor ReplicatedModule::mean_loss(ReplicaPass& pass,
                                       std::vector<std::vector<at::Tensor>> losses) const {
  double rows = 0;
  for (const Chunk& chunk : pass.chunks()) rows += static_cast<double>(chunk.rows);
  ReplicaPass::GatherOptions options;
  for (size_t position = 0; position < losses.size(); ++position) {
    const at::Tensor& loss = losses[position].front();
    const bool fits = loss.defined() && loss.dim() == 0 && loss.is_floating_point();
    TORCH_CHECK_VALUE(
        fits,
        error_text(kDataParallelArea,
                   std::string("got a loss ") +
                       (loss.defined() ? std::string("of ") + std::to_string(loss.dim()) +
                                             " dimensions and " + c10::toString(loss.scalar_type())
                                       : "that is undefined") +
                       " from " + replicas_->describe(pass.chunks()[position].replica) +
                       ", expected one floating-point number",
                   {}, "Take the mean in the loss function."));
    // A batch without rows is one chunk.
    const auto own = static_cast<double>(pass.chunks()[position].rows);
    options.weights.push_back(rows > 0 ? own / rows : 1.0);
  }
  return pass.gather(std::move(losses), options).front();
}

std::shared_ptr<torch::nn::Module> ReplicatedModule::clone_of_module(
    const std::optional<c10::Device>& device) const {
  return clone_module(*inner_, {device.value_or(device_holding(probe_))}).modules.front();
}

ReplicasReport ReplicatedModule::last_step() const {
  return replicas_ ? replicas_->last_step() : ReplicasReport{};
}

}  // namespace trireme
