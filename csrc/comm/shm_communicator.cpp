#include <trireme/comm/shm_communicator.h>

#include <trireme/comm/c10d_wait.h>
#include <trireme/comm/reduce_op.h>
#include <trireme/common/cpus.h>
#include <trireme/shm/deposit_ring.h>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace trireme {
namespace {

using TensorList = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The works of one verb, in the order they were issued. They keep their tensors alive.
class ShmState final : public Pending::State {
 public:
  void add(const WorkPtr& work) {
    works_.push_back(c10::static_intrusive_pointer_cast<ShmWork>(work));
  }

  bool done() const override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const auto& work) { return work->isCompleted(); });
  }
  void wait() override {
    for (const auto& work : works_) work->wait(kNoTimeout);
  }
  std::optional<Pending::Clock::time_point> finished_at() const override {
    return works_.empty() ? std::nullopt : works_.back()->finished_at();
  }

 private:
  std::vector<c10::intrusive_ptr<ShmWork>> works_;
};

bool on_cpu(const at::Tensor& tensor) { return tensor.is_cpu(); }

std::map<at::ScalarType, TensorList> by_dtype(const TensorList& tensors) {
  std::map<at::ScalarType, TensorList> runs;
  for (const at::Tensor& tensor : tensors) runs[tensor.scalar_type()].push_back(tensor);
  return runs;
}

class ShmCommunicator final : public Communicator, public HasGroupHealth {
 public:
  ShmCommunicator(c10::intrusive_ptr<ShmBackend> backend, std::shared_ptr<Communicator> others)
      : backend_(std::move(backend)), others_(std::move(others)), health_(health_of(*others_)) {}

  RankOf rank_of() const override { return others_->rank_of(); }

  Pending all_reduce(TensorList tensors, ReduceOp op, std::string label) override {
    if (!is_ours(tensors)) return others().all_reduce(std::move(tensors), op, std::move(label));
    return issue(std::move(label), [&](ShmState& state) {
      if (tensors.size() == 1 && tensors[0].is_sparse()) {
        c10d::AllreduceOptions options;
        options.reduceOp = to_c10d(op);
        return state.add(backend_->allreduce_sparse(tensors, options));
      }
      for (auto& [dtype, run] : by_dtype(tensors)) {
        c10d::AllreduceCoalescedOptions options;
        options.reduceOp = to_c10d(op);
        state.add(backend_->allreduce_coalesced(run, options));
      }
    });
  }

  Pending broadcast(TensorList tensors, int64_t root, std::string label) override {
    if (!is_ours(tensors)) return others().broadcast(std::move(tensors), root, std::move(label));
    return issue(std::move(label), [&](ShmState& state) {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      for (auto& [dtype, run] : by_dtype(tensors))
        state.add(backend_->broadcast_coalesced(run, options));
    });
  }

  Pending all_gather(TensorList outputs, TensorList inputs, std::string label) override {
    if (!is_ours(inputs))
      return others().all_gather(std::move(outputs), std::move(inputs), std::move(label));
    return issue(std::move(label), [&](ShmState& state) {
      for (size_t i = 0; i < inputs.size(); ++i)
        state.add(backend_->_allgather_base(outputs[i], inputs[i], {}));
    });
  }

  Pending reduce_scatter(TensorList outputs, TensorList inputs, ReduceOp op,
                         std::string label) override {
    if (!is_ours(inputs))
      return others().reduce_scatter(std::move(outputs), std::move(inputs), op, std::move(label));
    return issue(std::move(label), [&](ShmState& state) {
      c10d::ReduceScatterOptions options;
      options.reduceOp = to_c10d(op);
      for (size_t i = 0; i < inputs.size(); ++i)
        state.add(backend_->_reduce_scatter_base(outputs[i], inputs[i], options));
    });
  }

  Pending barrier(std::string label) override {
    return issue(std::move(label), [&](ShmState& state) { state.add(backend_->barrier({})); });
  }

  void announce_failure(const std::string& reason) noexcept override {
    if (uses_others_) others_->announce_failure(reason);
    backend_->abandon(reason);
  }

  void recover() override {
    if (uses_others_ || !backend_->host_group().has_abandoned()) return;
    barrier("recovery").wait();
    health_->clear_failure();
  }

  std::optional<std::string> failure() const override {
    if (auto failed = backend_->host_group().failure()) return failed;
    return others_->failure();
  }

  shm::HostGroup* host_group() override { return &backend_->host_group(); }

  std::unique_ptr<DepositStream> make_deposit_stream(int64_t bytes,
                                                     bool also_with_free_cpus) override {
    const bool wants_it = also_with_free_cpus || world() * at::get_num_threads() >= usable_cpus();
    std::unique_ptr<shm::DepositRing> ring;
    backend_->run_in_order(
        "trireme:make_deposit_stream", [&](shm::Collectives& collectives, shm::CallOptions call) {
          int32_t vote = wants_it ? 1 : 0;
          call.label = "vote on a deposit stream";
          collectives.all_reduce({reinterpret_cast<std::byte*>(&vote), sizeof(vote)},
                                 {shm::Dtype::kI32, shm::ReduceOp::kMin}, call);
          call.label = "deposit stream";
          if (vote == 1) ring = std::make_unique<shm::DepositRing>(collectives, bytes, call);
        });
    if (!ring) return nullptr;
    const auto backend = std::make_shared<c10::intrusive_ptr<ShmBackend>>(backend_);
    return std::make_unique<DepositStream>(std::move(ring), world(),
                                           backend_->getBackendOptions()->timeout, backend);
  }

  SharedMemory share_memory(int64_t bytes, std::string label) override {
    TORCH_CHECK_VALUE(bytes > 0, error_text("communicator",
                                            "share_memory got " + std::to_string(bytes) + " bytes",
                                            rank_of(), "Ask for at least one."));
    SharedMemory memory;
    backend_->run_in_order(
        "trireme:share_memory", [&](shm::Collectives& collectives, shm::CallOptions call) {
          call.label = label;
          shm::SharedSegment shared = collectives.share_segment(bytes, call);
          memory.why_not = std::move(shared.why_not);
          if (shared.segment)
            memory.segment = std::make_shared<const shm::Segment>(std::move(shared.segment));
        });
    return memory;
  }

  const std::shared_ptr<GroupHealth>& health() const override { return health_; }

 private:
  static bool is_ours(const TensorList& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), on_cpu);
  }

  Communicator& others() {
    uses_others_ = true;
    return *others_;
  }

  template <typename Issue>
  Pending issue(std::string label, Issue&& issue) {
    auto state = std::make_unique<ShmState>();
    const ShmBackend::ScopedLabel scope(std::move(label));
    issue(*state);
    return Pending(std::move(state));
  }

  c10::intrusive_ptr<ShmBackend> backend_;
  std::shared_ptr<Communicator> others_;
  std::shared_ptr<GroupHealth> health_;
  bool uses_others_ = false;
};

}  // namespace

c10::intrusive_ptr<ShmBackend> find_shm_backend(c10d::ProcessGroup& group) {
  if (!group.hasBackends()) return {};
  const auto devices = group.getDeviceTypes();
  if (std::none_of(devices.begin(), devices.end(), [](c10::Device d) { return d.is_cpu(); }))
    return {};
  const auto backend = group.getBackend(c10::DeviceType::CPU);
  auto* shm = dynamic_cast<ShmBackend*>(backend.get());
  if (shm == nullptr || !shm->shares_memory()) return {};
  return c10::intrusive_ptr<ShmBackend>::reclaim_copy(shm);
}

std::shared_ptr<Communicator> make_shm_communicator(c10::intrusive_ptr<ShmBackend> backend,
                                                    std::shared_ptr<Communicator> others) {
  return std::make_shared<ShmCommunicator>(std::move(backend), std::move(others));
}

}  // namespace trireme
