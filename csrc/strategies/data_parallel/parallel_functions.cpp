#include <trireme/strategies/data_parallel/parallel_functions.h>

#include <trireme/common/error.h>
#include <trireme/common/intra_op_threads.h>
#include <trireme/common/worker_pool.h>
#include <trireme/module/module_clones.h>
#include <trireme/strategies/data_parallel/core_groups.h>
#include <trireme/strategies/data_parallel/messages.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <exception>
#include <numeric>
#include <sstream>

namespace trireme {
namespace {

void check_dim(const at::Tensor& tensor, int64_t dim) {
  const int64_t rank = tensor.dim();
  TORCH_CHECK_VALUE(-rank <= dim && dim < rank,
                    error_text(kDataParallelArea,
                               std::string("got dim ") + std::to_string(dim) + " for a tensor of " +
                                   std::to_string(rank) + " dimensions, expected " +
                                   std::to_string(-rank) + " to " + std::to_string(rank - 1),
                               {}, "Give the dimension that holds the batch."));
}

void check_devices(const std::vector<c10::Device>& devices) {
  TORCH_CHECK_VALUE(!devices.empty(),
                    error_text(kDataParallelArea, "got no devices, expected one at least", {},
                               "Name a device for each replica."));
}

// Throws unless `tensor` fits behind `first` along `dim`.
void check_fits(const at::Tensor& tensor, const at::Tensor& first, int64_t dim) {
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == first.scalar_type(),
      error_text(kDataParallelArea,
                 std::string("got ") + c10::toString(tensor.scalar_type()) + " beside " +
                     c10::toString(first.scalar_type()) + ", expected tensors of one dtype",
                 {}, "Bring them to one dtype."));
  bool fits = tensor.dim() == first.dim();
  for (int64_t i = 0; fits && i < first.dim(); ++i)
    fits = i == dim || tensor.size(i) == first.size(i);
  TORCH_CHECK_VALUE(fits, error_text(kDataParallelArea,
                                     std::string("got shape ") + shape_text(tensor) + " beside " +
                                         shape_text(first) + ", expected them to differ in dim " +
                                         std::to_string(dim) + " at most",
                                     {}, "Gather along the dimension of the batch."));
}

}  // namespace

std::vector<at::Tensor> scatter(const at::Tensor& tensor, const std::vector<c10::Device>& devices,
                                int64_t dim) {
  check_devices(devices);
  std::vector<at::Tensor> parts;
  if (tensor.dim() == 0) {
    parts.assign(devices.size(), tensor);
  } else {
    check_dim(tensor, dim);
    parts = tensor.chunk(static_cast<int64_t>(devices.size()), dim);
  }
  for (size_t i = 0; i < parts.size(); ++i)
    parts[i] = parts[i].to(devices[i], /*non_blocking=*/true);
  return parts;
}

at::Tensor gather(const std::vector<at::Tensor>& tensors, c10::Device device, int64_t dim) {
  TORCH_CHECK_VALUE(!tensors.empty(),
                    error_text(kDataParallelArea, "got no tensors, expected one at least", {},
                               "Gather what replicas have returned."));
  const at::Tensor& first = tensors.front();
  if (first.dim() > 0) check_dim(first, dim);
  const int64_t place = dim < 0 ? dim + first.dim() : dim;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    check_fits(tensor, first, place);
    parts.push_back(tensor.to(device, /*non_blocking=*/true));
  }
  if (first.dim() > 0) return at::cat(parts, dim);
  TORCH_WARN(error_text(kDataParallelArea, "got 0-dim tensors to gather, expected rows", {},
                        "They are returned as a vector."));
  return at::stack(parts);
}

std::vector<std::shared_ptr<torch::nn::Module>> replicate_module(
    const torch::nn::Module& module, const std::vector<c10::Device>& devices) {
  check_devices(devices);
  ModuleClones clones = clone_module(module, devices);
  follow_training(clones);
  connect(clones);
  return std::move(clones.modules);
}

void check_as_many(const std::string& what, size_t got, size_t expected) {
  TORCH_CHECK_VALUE(got == expected && expected > 0,
                    error_text(kDataParallelArea,
                               std::string("got ") + std::to_string(got) + " " + what + " for " +
                                   std::to_string(expected) + " modules, expected as many",
                               {}, "Give one for each module."));
}

void run_in_threads(const std::vector<c10::Device>& devices,
                    const std::function<void(size_t i)>& job) {
  if (devices.size() == 1) {
    const c10::OptionalDeviceGuard device_guard(devices.front());
    job(0);
    return;
  }
  WorkerPool pool(devices, intra_op_threads_of(at::get_num_threads(), devices.size()));
  pool.start();
  std::vector<size_t> all(devices.size());
  std::iota(all.begin(), all.end(), size_t{0});
  const std::vector<std::exception_ptr> errors = pool.run(all, job);
  for (size_t i = 0; i < errors.size(); ++i) {
    if (!errors[i]) continue;
    try {
      std::rethrow_exception(errors[i]);
    } catch (c10::Error& error) {
      error.add_context(std::string("[data_parallel] in module ") + std::to_string(i) + " of " +
                        std::to_string(errors.size()) + " (" + devices[i].str() + ")");
      throw;
    }
  }
}

std::vector<c10::Device> default_devices(const torch::nn::Module& module) {
  const std::vector<at::Tensor> parameters = module.parameters();
  const c10::Device home =
      parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device();
  if (home.is_cpu())
    return std::vector<c10::Device>(static_cast<size_t>(default_replicas(at::get_num_threads())),
                                    home);
  std::vector<c10::Device> devices;
  const c10::DeviceIndex count = c10::impl::VirtualGuardImpl(home.type()).deviceCount();
  for (c10::DeviceIndex i = 0; i < count; ++i) devices.emplace_back(home.type(), i);
  return devices;
}

}  // namespace trireme
