#include <device/sim_engine.h>

#include <trireme/comm/c10d/gloo_group.h>
#include <trireme/comm/launch/make_communicator.h>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <device/sim_device.h>
#include <device/sim_stream.h>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace trireme::test {
namespace {

using Tensors = std::vector<at::Tensor>;

// Longer than anything that waits for nothing.
constexpr std::chrono::microseconds kCollectiveLag{1500};

struct Ending {
  std::mutex mutex;
  std::exception_ptr error;
};

class SimWork final : public c10d::Work {
 public:
  SimWork(c10::Stream stream, SimEvent end, std::shared_ptr<Ending> ending, Tensors kept)
      : stream_(stream),
        end_(end),
        ending_(std::move(ending)),
        kept_(std::move(kept)),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{stream.device()})) {
    const c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(kept_));
  }

  bool isCompleted() override { return end_.stream->is_done(end_.ticket); }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    const std::lock_guard<std::mutex> lock(ending_->mutex);
    return ending_->error;
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    if (const auto error = exception()) std::rethrow_exception(error);
    block(sim_stream(current_sim_stream(stream_.device())), end_);
    kept_.clear();
    return true;
  }
  void synchronize() override { wait(c10d::kUnsetTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::Stream stream_;
  SimEvent end_;
  std::shared_ptr<Ending> ending_;
  Tensors kept_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class SimEngine final : public c10d::Backend {
 public:
  explicit SimEngine(c10::intrusive_ptr<c10d::Backend> within)
      : c10d::Backend(within->getRank(), within->getSize()), within_(std::move(within)) {}

  const std::string getBackendName() const override { return "sim"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return {}; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& /*options*/) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    return make_sim_engine(store, {place, static_cast<int64_t>(ranks.size())});
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return issue(tensors,
                 [this, options](Tensors& host) { reduce(host.front(), options.reduceOp); });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return issue(tensors, [this, options](Tensors& host) {
      Tensors list{host.front()};
      within_->broadcast(list, options)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    return issue({output, input}, [this](Tensors& host) { gather(host[0], host[1]); });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    Tensors all = outputs;
    all.insert(all.end(), inputs.begin(), inputs.end());
    return issue(all, [this](Tensors& host) {
      const size_t half = host.size() / 2;
      for (size_t i = 0; i < half; ++i) gather(host[i], host[half + i]);
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return issue({output, input}, [this, options](Tensors& host) {
      at::Tensor sum = host[1].clone();
      reduce(sum, options.reduceOp);
      host[0].copy_(sum.chunk(size_)[static_cast<size_t>(rank_)].view(host[0].sizes()));
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_split,
                                               std::vector<int64_t>& input_split,
                                               const c10d::AllToAllOptions& options) override {
    return issue(
        {output, input}, [this, output_split, input_split, options](Tensors& host) mutable {
          within_->alltoall_base(host[0], host[1], output_split, input_split, options)->wait();
        });
  }
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return issue(tensors, [this, to, tag](Tensors& host) { within_->send(host, to, tag)->wait(); });
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return issue(tensors,
                 [this, from, tag](Tensors& host) { within_->recv(host, from, tag)->wait(); });
  }
  // The caller waits, as with NCCL.
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& /*options*/) override {
    Tensors list{at::ones({1}, c10::Device(kSim))};
    auto work = allreduce(list, {});
    const c10::Stream own = own_stream(list.front().device());
    sim_stream(own).wait(sim_stream(own).last());
    return work;
  }

 private:
  c10::Stream own_stream(c10::Device device) {
    if (!stream_)
      stream_ = c10::impl::VirtualGuardImpl(kSim).getStreamFromGlobalPool(device, false);
    return *stream_;
  }

  c10::intrusive_ptr<c10d::Work> issue(Tensors tensors, std::function<void(Tensors&)> collective) {
    const c10::Device device = tensors.front().device();
    for (const at::Tensor& tensor : tensors) TORCH_CHECK(tensor.device() == device, "sim: device");
    const c10::Stream own = own_stream(device);
    SimStream& stream = sim_stream(own);
    block(stream, event_of(sim_stream(current_sim_stream(device))));
    Tensors host;
    for (const at::Tensor& tensor : tensors) host.push_back(on_host(tensor));
    auto ending = std::make_shared<Ending>();
    stream.enqueue(
        [host = std::move(host), collective = std::move(collective), ending]() mutable {
          try {
            collective(host);
          } catch (...) {
            const std::lock_guard<std::mutex> lock(ending->mutex);
            ending->error = std::current_exception();
          }
        },
        kCollectiveLag);
    return c10::make_intrusive<SimWork>(own, event_of(stream), ending, std::move(tensors));
  }

  void reduce(at::Tensor& sums, const c10d::ReduceOp& op) {
    const bool averages = op == c10d::ReduceOp::AVG;
    Tensors list{sums};
    c10d::AllreduceOptions options;
    options.reduceOp = averages ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    within_->allreduce(list, options)->wait();
    if (averages) sums.div_(size_);
  }

  void gather(at::Tensor& output, const at::Tensor& input) {
    Tensors own{input.clone()};  // it may lie in the output
    std::vector<Tensors> parts{output.chunk(size_)};
    within_->allgather(parts, own)->wait();
  }

  c10::intrusive_ptr<c10d::Backend> within_;
  std::optional<c10::Stream> stream_;
};

c10::intrusive_ptr<c10d::Backend> connect(const char* name,
                                          const c10::intrusive_ptr<c10d::Store>& store,
                                          RankOf where) {
  constexpr std::chrono::seconds kTimeout{20};
  return make_gloo_backend(
      c10::make_intrusive<c10d::PrefixStore>(name, store), where,
      {.timeout = kTimeout, .connect_timeout = kTimeout, .hostname = "127.0.0.1"});
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_sim_engine(const c10::intrusive_ptr<c10d::Store>& store,
                                                  RankOf where) {
  return c10::make_intrusive<SimEngine>(connect("sim", store, where));
}

void run_sim_ranks(int64_t world, const std::function<void(ThreadRank&)>& rank_main,
                   SimGroup kind) {
  const auto main = [&](ThreadRank& rank) {
    use_sim_device(sim_device(rank.where.rank));
    using Group = c10d::ProcessGroup;
    auto group = c10::make_intrusive<Group>(rank.store, static_cast<int>(rank.where.rank),
                                            static_cast<int>(rank.where.world));
    if (kind == SimGroup::kBesideGloo)
      group->setBackend(c10::kCPU, Group::BackendType::GLOO,
                        connect("cpu", rank.store, rank.where));
    group->setBackend(kSim, Group::BackendType::CUSTOM, make_sim_engine(rank.store, rank.where));
    group->setDefaultBackend(Group::BackendType::CUSTOM);
    rank.group = group;
    rank.communicator = make_communicator(group, rank.store);
    rank_main(rank);
    synchronize(sim_device(rank.where.rank));
  };
  run_thread_ranks(world, main);
}

}  // namespace trireme::test
