#include <trireme/comm/c10d/gloo_group.h>

#include <trireme/comm/c10d/engine_options.h>
#include <trireme/common/duration.h>
#include <trireme/common/exception_text.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>
#include <exception>

namespace trireme {
namespace {

using c10d::ProcessGroupGloo;

c10::intrusive_ptr<ProcessGroupGloo::Options> gloo_options(const GlooOptions& options) {
  if (options.hostname.empty()) {
    return ProcessGroupGloo::Options::create_default(saturated(options.connect_timeout));
  }
  auto result = ProcessGroupGloo::Options::create(saturated(options.connect_timeout));
  result->devices.push_back(ProcessGroupGloo::createDeviceForHostname(options.hostname));
  return result;
}

// Ignores SIGPIPE, unless the program has set a handler.
void let_writes_to_dead_peers_raise() {
  struct sigaction now = {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
    std::signal(SIGPIPE, SIG_IGN);
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    RankOf where, const GlooOptions& options) {
  let_writes_to_dead_peers_raise();
  try {
    auto backend = c10::make_intrusive<ProcessGroupGloo>(
        store, static_cast<int>(where.rank), static_cast<int>(where.world), gloo_options(options));
    backend->setTimeout(saturated(options.timeout));
    return backend;
  } catch (const std::exception& error) {
    C10_THROW_ERROR(
        DistBackendError,
        error_text(
            "launch", "Gloo could not connect the ranks: " + first_line_of(error), where,
            "Check that all ranks run and that this machine's name resolves to an address the "
            "others can reach, or name an interface in GLOO_SOCKET_IFNAME."));
  }
}

EngineOptions copy_gloo_options(const EngineOptions& options) {
  return c10::make_intrusive<ProcessGroupGloo::Options>(
      dynamic_cast<const ProcessGroupGloo::Options&>(*options));
}

c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                       RankOf where, const GlooOptions& options) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(where.rank),
                                                       static_cast<int>(where.world));
  constexpr auto kGloo = c10d::ProcessGroup::BackendType::GLOO;
  auto backend = make_gloo_backend(store, where, options);
  group->setBackend(c10::DeviceType::CPU, kGloo, backend);
  group->setBackend(c10::DeviceType::CUDA, kGloo, backend);
  group->setDefaultBackend(kGloo);
  return group;
}

}  // namespace trireme
