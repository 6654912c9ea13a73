#include <trireme/comm/backend/hosts_communicator.h>

#include <trireme/comm/backend/verbs.h>
#include <trireme/shm/segment.h>

#include <utility>

namespace trireme {
namespace {

class HostsCommunicator final : public ShmVerbs {
 public:
  using ShmVerbs::ShmVerbs;

  // Makes waits here and on other hosts raise: no rank looks into the Store meanwhile.
  void announce_failure(const std::string& reason) noexcept override {
    if (uses_others()) others().announce_failure(reason);
    backend()->fail(reason);
  }

  // Splits through c10d: announcements must be heard in parts of the group, too.
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks,
                                      const std::string& name) override {
    return others().split(ranks, name);
  }

  // Sends between hosts, by the engine that connects them.
  Pending send(std::vector<at::Tensor> tensors, int64_t to, std::string label) override {
    return others().send(std::move(tensors), to, std::move(label));
  }
  Pending recv(std::vector<at::Tensor> tensors, int64_t from, std::string label) override {
    return others().recv(std::move(tensors), from, std::move(label));
  }

  std::unique_ptr<DepositStream> make_deposit_stream(int64_t /*bytes*/,
                                                     bool /*also_with_free_cpus*/) override {
    return nullptr;
  }

  SharedMemory share_memory(int64_t /*bytes*/, std::string /*label*/) override { return {}; }

  HostMemory share_host_memory(int64_t bytes, std::string label) override {
    TORCH_CHECK_VALUE(
        bytes > 0,
        error_text("communicator", "share_host_memory got " + std::to_string(bytes) + " bytes",
                   rank_of(), "Ask for at least one."));
    const shm::HostGroup& group = backend()->host_group();
    HostMemory host{.where = {group.rank(), group.world()}};
    backend()->run_between_hosts("trireme:share_memory",
                                 [&](MultiHostCollectives& hosts, shm::CallOptions call) {
                                   call.label = label;
                                   host.memory = memory_of(hosts.share_segment(bytes, call));
                                 });
    return host;
  }

  Pending all_gather_in_host(PartsByRank parts, std::string label) override {
    return issue(std::move(label), [&] { return Works{backend()->all_gather_in_host(parts)}; });
  }
};

}  // namespace

std::shared_ptr<Communicator> make_hosts_communicator(c10::intrusive_ptr<ShmBackend> backend,
                                                      std::shared_ptr<Communicator> others) {
  return std::make_shared<HostsCommunicator>(std::move(backend), std::move(others));
}

}  // namespace trireme
