#include <trireme/comm/backend/shm_communicator.h>

#include <trireme/comm/backend/hosts_communicator.h>
#include <trireme/comm/backend/verbs.h>
#include <trireme/common/cpus.h>
#include <trireme/shm/deposit_ring.h>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace trireme {
namespace {

class ShmCommunicator final : public ShmVerbs {
 public:
  using ShmVerbs::ShmVerbs;

  void announce_failure(const std::string& reason) noexcept override {
    if (uses_others()) others().announce_failure(reason);
    backend()->abandon(reason);
  }

  void recover() override {
    if (uses_others() || !backend()->host_group().has_abandoned()) return;
    backend()->abandon("what comes next has begun");  // ends what is still queued
    barrier("recovery").wait();
    health()->clear_failure();
  }

  std::unique_ptr<DepositStream> make_deposit_stream(int64_t bytes,
                                                     bool also_with_free_cpus) override {
    const bool wants_it = also_with_free_cpus || world() * at::get_num_threads() >= usable_cpus();
    std::unique_ptr<shm::DepositRing> ring;
    backend()->run_in_order(
        "trireme:make_deposit_stream", [&](shm::Collectives& collectives, shm::CallOptions call) {
          int32_t vote = wants_it ? 1 : 0;
          call.label = "vote on a deposit stream";
          collectives.all_reduce({reinterpret_cast<std::byte*>(&vote), sizeof(vote)},
                                 {shm::Dtype::kI32, shm::ReduceOp::kMin}, call);
          call.label = "deposit stream";
          if (vote == 1) ring = std::make_unique<shm::DepositRing>(collectives, bytes, call);
        });
    if (!ring) return nullptr;
    return std::make_unique<DepositStream>(
        std::move(ring), backend()->host_group(),
        std::make_shared<c10::intrusive_ptr<ShmBackend>>(backend()));
  }

  SharedMemory share_memory(int64_t bytes, std::string label) override {
    TORCH_CHECK_VALUE(bytes > 0, error_text("communicator",
                                            "share_memory got " + std::to_string(bytes) + " bytes",
                                            rank_of(), "Ask for at least one."));
    SharedMemory memory;
    backend()->run_in_order("trireme:share_memory",
                            [&](shm::Collectives& collectives, shm::CallOptions call) {
                              call.label = label;
                              memory = memory_of(collectives.share_segment(bytes, call));
                            });
    return memory;
  }

  HostMemory share_host_memory(int64_t bytes, std::string label) override {
    return {share_memory(bytes, std::move(label)), rank_of()};
  }

  // All ranks of the group map this memory already.
  Pending all_gather_in_host(PartsByRank /*parts*/, std::string label) override {
    return barrier(std::move(label));
  }
};

}  // namespace

c10::intrusive_ptr<ShmBackend> find_shm_backend(c10d::ProcessGroup& group) {
  if (!group.hasBackends()) return {};
  const auto devices = group.getDeviceTypes();
  if (std::none_of(devices.begin(), devices.end(), [](c10::Device d) { return d.is_cpu(); }))
    return {};
  const auto backend = group.getBackend(c10::DeviceType::CPU);
  auto* shm = dynamic_cast<ShmBackend*>(backend.get());
  if (shm == nullptr || !shm->uses_memory()) return {};
  return c10::intrusive_ptr<ShmBackend>::reclaim_copy(shm);
}

std::shared_ptr<Communicator> make_shm_communicator(c10::intrusive_ptr<ShmBackend> backend,
                                                    std::shared_ptr<Communicator> others) {
  if (!backend->shares_memory())
    return make_hosts_communicator(std::move(backend), std::move(others));
  return std::make_shared<ShmCommunicator>(std::move(backend), std::move(others));
}

}  // namespace trireme
