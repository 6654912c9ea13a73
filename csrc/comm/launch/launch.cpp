#include <trireme/comm/launch/launch.h>

#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/backend/shm_communicator.h>
#include <trireme/comm/c10d/gloo_group.h>
#include <trireme/comm/c10d/nccl_backend.h>
#include <trireme/comm/group_health.h>
#include <trireme/comm/launch/before_shutdown.h>
#include <trireme/comm/launch/make_communicator.h>
#include <trireme/comm/launch/rendezvous.h>
#include <trireme/common/cpus.h>
#include <trireme/common/duration.h>
#include <trireme/common/env.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace trireme {

using std::chrono::milliseconds;

struct Context::Group {
  Rendezvous rendezvous;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  std::shared_ptr<Communicator> communicator;

  explicit Group(const RendezvousRequest& request) : rendezvous(request) {}
};

namespace {

// The communicator that current_communicator() returns. It is weak: the Context alone decides how
// long the group lives.
std::mutex latest_mutex;
std::weak_ptr<Communicator> latest_communicator;

void remember_communicator(const std::shared_ptr<Communicator>& communicator) {
  const std::lock_guard<std::mutex> lock(latest_mutex);
  latest_communicator = communicator;
}

constexpr milliseconds kFarewell = std::chrono::seconds(30);
constexpr milliseconds kFarewellOfAFailure = std::chrono::seconds(1);

using c10d::ProcessGroup;

// The engines of a run; empty: none for that kind of device.
struct Engines {
  std::string cpu;
  std::string cuda;
};

const std::map<std::string, Engines>& known_backends() {
  static const std::map<std::string, Engines> known = {
      {"trireme", {"trireme", ""}},
      {"gloo", {"gloo", "gloo"}},
      {"nccl", {"", "nccl"}},
      {"cpu:trireme,cuda:nccl", {"trireme", "nccl"}},
      {"cpu:gloo,cuda:nccl", {"gloo", "nccl"}},
  };
  return known;
}

bool has_nccl(const std::string& backend) { return known_backends().at(backend).cuda == "nccl"; }

LaunchEnvironment read_environment(const InitOptions& options) {
  TORCH_CHECK_VALUE(options.rank.has_value() == options.world.has_value(),
                    error_text("launch", "rank and world were not given together", {},
                               "Pass both, or neither and let the environment say them."));
  if (!options.rank) return read_launch_environment();
  return read_launch_environment(RankOf{*options.rank, *options.world});
}

void check_backend(const InitOptions& options, RankOf where) {
  const std::string& backend = options.backend;
  TORCH_CHECK_VALUE(backend.empty() || known_backends().count(backend) > 0,
                    error_text("launch",
                               "backend is '" + backend +
                                   "', expected trireme, gloo, nccl, or cpu:trireme,cuda:nccl",
                               where, "Other engines of c10d are reached from Python."));
  if (!options.device) return;
  TORCH_CHECK_VALUE(
      options.device->is_cpu() || options.device->is_cuda(),
      error_text("launch", "device is " + options.device->str() + ", expected cpu or cuda", where,
                 "Pass another device."));
  if (backend.empty()) return;
  const Engines& engines = known_backends().at(backend);
  TORCH_CHECK_VALUE(
      !(options.device->is_cuda() ? engines.cuda : engines.cpu).empty(),
      error_text("launch", "backend " + backend + " cannot serve device " + options.device->str(),
                 where, "Use another backend, or leave it out."));
}

// A job step that gives each rank one GPU shows each rank that GPU alone, as number 0.
c10::DeviceIndex index_of_rank(const LaunchEnvironment& environment, int64_t gpus) {
  const bool one_gpu_each = environment.launcher == Launcher::kSlurm && gpus == 1;
  return static_cast<c10::DeviceIndex>(one_gpu_each ? 0 : environment.local_rank);
}

// libtorch_cuda comes into a C++ program only by being linked or loaded; without it torch sees no
// GPU.
void tell_of_unseen_gpus(RankOf where) {
  if (where.rank != 0 || c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return;
  std::error_code unreadable;
  if (!std::filesystem::exists("/dev/nvidiactl", unreadable)) return;
  TORCH_WARN_ONCE(error_text(
      "launch", "this machine has a GPU, but libtorch_cuda is not linked: the device is cpu", where,
      "For the GPU use find_package(Trireme COMPONENTS CUDA), or pass the backend "
      "\"cpu:trireme,cuda:nccl\"; for no GPU pass the device cpu."));
}

c10::Device choose_device(const InitOptions& options, const LaunchEnvironment& environment) {
  const RankOf where = environment.rank_of();
  const bool wants_nccl = !options.backend.empty() && has_nccl(options.backend);
  if (wants_nccl) load_nccl(where);  // libtorch_cuda comes with it
  const bool by_default = wants_nccl || (options.backend.empty() && at::hasCUDA());
  if (!by_default && options.backend.empty() && !options.device) tell_of_unseen_gpus(where);
  const c10::Device wanted =
      options.device.value_or(by_default ? c10::DeviceType::CUDA : c10::DeviceType::CPU);
  if (wanted.is_cpu()) return wanted;

  TORCH_CHECK_VALUE(
      at::hasCUDA(),
      error_text("launch", "device is " + wanted.str() + " but this program sees no GPU", where,
                 "Link it with libtorch_cuda (find_package(Trireme COMPONENTS CUDA)), check the "
                 "driver, or use device cpu."));
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  const auto gpus = static_cast<int64_t>(cuda.deviceCount());
  const c10::Device device(c10::DeviceType::CUDA,
                           wanted.has_index() ? wanted.index() : index_of_rank(environment, gpus));
  TORCH_CHECK_VALUE(device.index() < gpus,
                    error_text("launch",
                               "device is " + device.str() + ", expected one of " +
                                   std::to_string(gpus) + " GPUs",
                               where, "Start at most one rank per GPU, or pass a device."));
  cuda.setDevice(device);
  return device;
}

struct ConnectRequest {
  c10::intrusive_ptr<c10d::Store> store;
  RankOf where;
  c10::Device device;
  std::optional<milliseconds> timeout;
};

// Ranks in C++ and in Python are of one group, so that keys are those of torch's
// init_process_group(): the group is called "0", and each engine by its first device.
constexpr const char* kGroupKeys = "0/";

c10::intrusive_ptr<c10d::Backend> make_engine(const std::string& engine, const char* device,
                                              const ConnectRequest& request) {
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>(std::string(device) + "/", request.store);
  GlooOptions gloo;
  if (request.timeout) gloo.timeout = gloo.connect_timeout = saturated(*request.timeout);
  if (engine == "gloo") return make_gloo_backend(store, request.where, gloo);
  if (engine == "nccl") return make_nccl_backend({store, request.where, gloo.timeout});
  ShmOptions shm;
  shm.timeout = gloo.timeout;
  shm.connect_timeout = gloo.connect_timeout;
  return make_shm_backend(store, request.where, shm);
}

ProcessGroup::BackendType type_of(const std::string& engine) {
  using Type = ProcessGroup::BackendType;
  return engine == "gloo" ? Type::GLOO : engine == "nccl" ? Type::NCCL : Type::CUSTOM;
}

c10::intrusive_ptr<ProcessGroup> connect(const Engines& engines, const ConnectRequest& request) {
  const RankOf where = request.where;
  auto group = c10::make_intrusive<ProcessGroup>(request.store, static_cast<int>(where.rank),
                                                 static_cast<int>(where.world));
  c10::intrusive_ptr<c10d::Backend> on_cpu;
  if (!engines.cpu.empty()) {
    on_cpu = make_engine(engines.cpu, "cpu", request);
    group->setBackend(c10::DeviceType::CPU, type_of(engines.cpu), on_cpu);
  }
  if (engines.cuda == "nccl") group->setBoundDeviceId(request.device);
  if (!engines.cuda.empty()) {
    const bool is_same = engines.cuda == engines.cpu;
    group->setBackend(c10::DeviceType::CUDA, type_of(engines.cuda),
                      is_same ? on_cpu : make_engine(engines.cuda, "cuda", request));
  }
  group->setDefaultBackend(type_of(engines.cuda.empty() ? engines.cpu : engines.cuda));
  return group;
}

// NCCL ends what is in flight before it lets go of a communicator; after a failure that would be a
// wait for peers that do not come.
void disconnect(c10::intrusive_ptr<c10d::ProcessGroup> group, bool failing) noexcept {
  try {
    failing ? group->abort() : group->shutdown();
  } catch (const std::exception& error) {
    TORCH_WARN("[launch] while disconnecting: ", error.what());
  }
}

}  // namespace

Context::Context(RankOf where, RankOf local, c10::Device device, std::unique_ptr<Group> group)
    : where_(where), local_(local), device_(device), group_(std::move(group)) {}

Context::Context(Context&&) noexcept = default;

Context& Context::operator=(Context&& other) noexcept {
  shutdown();
  where_ = other.where_;
  local_ = other.local_;
  device_ = other.device_;
  group_ = std::move(other.group_);
  return *this;
}

Context::~Context() { shutdown(); }

const Context::Group& Context::group() const {
  TORCH_CHECK_VALUE(group_ != nullptr,
                    error_text("launch", "the context was shut down", where_,
                               "Call shutdown() after the last use of the group."));
  return *group_;
}

std::shared_ptr<Communicator> Context::communicator() const { return group().communicator; }

std::shared_ptr<Communicator> current_communicator() {
  const std::lock_guard<std::mutex> lock(latest_mutex);
  auto communicator = latest_communicator.lock();
  TORCH_CHECK_VALUE(communicator,
                    error_text("launch", "got no group of ranks, expected a living Context", {},
                               "Call trireme::init() first and keep what it returns."));
  return communicator;
}

const c10::intrusive_ptr<c10d::ProcessGroup>& Context::process_group() const {
  return group().process_group;
}

const c10::intrusive_ptr<c10d::Store>& Context::store() const { return group().rendezvous.store(); }

void Context::shutdown() noexcept {
  if (group_ == nullptr) return;
  const std::unique_ptr<Group> group = std::move(group_);
  const bool failing = std::uncaught_exceptions() > 0;
  run_before_shutdown(failing);
  // The message is sent first, so that a peer which waits for this rank does not take it for dead.
  const std::string error = failing ? "an exception, which its output shows" : "";
  if (const auto backend = find_shm_backend(*group->process_group)) backend->end_run(error);
  if (const auto health = group->communicator->health()) health->board.leave(error);
  // The connections go first: a peer that waits for this rank then sees at once that no rank will
  // answer.
  group->communicator.reset();
  disconnect(std::move(group->process_group), failing);
  if (!group->rendezvous.leave(failing ? kFarewellOfAFailure : kFarewell) && !failing) {
    TORCH_WARN(
        error_text("launch", "ended before all other ranks had called shutdown()", where_,
                   "They may lose the Store that this rank served; look for a rank that failed."));
  }
}

Context init(const InitOptions& options) {
  const LaunchEnvironment environment = read_environment(options);
  const RankOf where = environment.rank_of();
  check_backend(options, where);
  const c10::Device device = choose_device(options, environment);
  if (const auto threads = threads_per_rank(environment, usable_cpus());
      threads && options.set_threads) {
    at::set_num_threads(static_cast<int>(*threads));
  }

  auto group = std::make_unique<Context::Group>(
      RendezvousRequest{environment, options.init_method, options.timeout});
  const c10::intrusive_ptr<c10d::Store> store =
      c10::make_intrusive<c10d::PrefixStore>(kGroupKeys, group->rendezvous.store());
  const std::string backend = !options.backend.empty() ? options.backend
                              : device.is_cpu()        ? "trireme"
                                                       : "cpu:trireme,cuda:nccl";
  group->process_group =
      connect(known_backends().at(backend), {store, where, device, options.timeout});
  group->communicator = make_communicator(group->process_group, store);
  remember_communicator(group->communicator);
  return Context(where, {environment.local_rank, environment.local_world}, device,
                 std::move(group));
}

}  // namespace trireme
