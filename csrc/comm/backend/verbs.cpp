#include <trireme/comm/backend/verbs.h>

#include <trireme/comm/messages.h>
#include <trireme/comm/reduce_op.h>
#include <trireme/common/exception_text.h>
#include <trireme/shm/host_group.h>

#include <algorithm>
#include <map>
#include <utility>

namespace trireme {
namespace {

using TensorList = std::vector<at::Tensor>;

// The works of one verb, in the order in which they were issued. They keep their tensors alive.
class ShmState final : public Pending::State {
 public:
  explicit ShmState(const std::vector<ShmBackend::WorkPtr>& works) {
    for (const auto& work : works)
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

// How long a rank waits for a message before it checks whether the other one has left.
constexpr std::chrono::milliseconds kLook{250};
constexpr std::chrono::milliseconds kShortest{1};  // 0 would be no timeout

class ShmMessages final : public Messages {
 public:
  ShmMessages(c10::intrusive_ptr<ShmBackend> backend, int64_t peer, std::string operation)
      : backend_(std::move(backend)), peer_(peer), operation_(std::move(operation)) {}

 private:
  bool wait_until(c10d::Work& work, bool /*on_cpu*/, Pending::Clock::time_point deadline) override {
    const auto slice = [&] {
      const auto left = deadline - Pending::Clock::now();
      return std::clamp(std::chrono::ceil<std::chrono::milliseconds>(left), kShortest, kLook);
    };
    while (!came_within(work, slice())) {
      check_peer();
      if (Pending::Clock::now() >= deadline) return false;
    }
    return true;
  }

  bool came_within(c10d::Work& work, std::chrono::milliseconds slice) const {
    try {
      return work.wait(slice);
    } catch (const c10::DistBackendError&) {  // the slice is over, or the message has failed
      if (!work.isCompleted()) return false;
    }
    try {
      return work.wait(slice);  // asked again, a message that came at the end of the slice says so
    } catch (const c10::DistBackendError& error) {
      fail(first_line_of(error),
           "Let both ranks pass as many tensors, of the same sizes and dtypes; see that rank if it "
           "has ended");
    }
  }
  // Ends the operations of all ranks, as a collective does, if a message is awaited in vain.
  void check_peer() const {
    const std::string left = backend_->host_group().left_by(peer_);
    if (left.empty()) return;
    backend_->abandon(left);
    fail(left, "See the traceback there");
  }
  [[noreturn]] void fail(const std::string& why, const std::string& next_step) const {
    C10_THROW_ERROR(DistBackendError, error_text("comm", operation_ + " failed: " + why,
                                                 backend_->host_group().where(), next_step));
  }

  c10::intrusive_ptr<ShmBackend> backend_;
  int64_t peer_;
  std::string operation_;
};

bool are_on_cpu(const TensorList& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.is_cpu(); });
}

std::map<at::ScalarType, TensorList> by_dtype(const TensorList& tensors) {
  std::map<at::ScalarType, TensorList> runs;
  for (const at::Tensor& tensor : tensors) runs[tensor.scalar_type()].push_back(tensor);
  return runs;
}

}  // namespace

ShmVerbs::ShmVerbs(c10::intrusive_ptr<ShmBackend> backend, std::shared_ptr<Communicator> others)
    : backend_(std::move(backend)), others_(std::move(others)), health_(health_of(*others_)) {}

Pending ShmVerbs::all_reduce(TensorList tensors, ReduceOp op, std::string label) {
  if (!are_on_cpu(tensors)) return others().all_reduce(std::move(tensors), op, std::move(label));
  return issue(std::move(label), [&] {
    Works works;
    if (tensors.size() == 1 && tensors[0].is_sparse()) {
      c10d::AllreduceOptions options;
      options.reduceOp = to_c10d(op);
      works.push_back(backend_->allreduce_sparse(tensors, options));
      return works;
    }
    for (auto& [dtype, run] : by_dtype(tensors)) {
      c10d::AllreduceCoalescedOptions options;
      options.reduceOp = to_c10d(op);
      works.push_back(backend_->allreduce_coalesced(run, options));
    }
    return works;
  });
}

Pending ShmVerbs::broadcast(TensorList tensors, int64_t root, std::string label) {
  if (!are_on_cpu(tensors)) return others().broadcast(std::move(tensors), root, std::move(label));
  return issue(std::move(label), [&] {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    Works works;
    for (auto& [dtype, run] : by_dtype(tensors))
      works.push_back(backend_->broadcast_coalesced(run, options));
    return works;
  });
}

Pending ShmVerbs::all_gather(TensorList outputs, TensorList inputs, std::string label) {
  if (!are_on_cpu(inputs))
    return others().all_gather(std::move(outputs), std::move(inputs), std::move(label));
  return issue(std::move(label), [&] {
    Works works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(backend_->_allgather_base(outputs[i], inputs[i], {}));
    return works;
  });
}

Pending ShmVerbs::reduce_scatter(TensorList outputs, TensorList inputs, ReduceOp op,
                                 std::string label) {
  if (!are_on_cpu(inputs))
    return others().reduce_scatter(std::move(outputs), std::move(inputs), op, std::move(label));
  return issue(std::move(label), [&] {
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(op);
    Works works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(backend_->_reduce_scatter_base(outputs[i], inputs[i], options));
    return works;
  });
}

Pending ShmVerbs::send(TensorList tensors, int64_t to, std::string label) {
  if (!are_on_cpu(tensors)) return others().send(std::move(tensors), to, std::move(label));
  auto messages =
      std::make_unique<ShmMessages>(backend_, to, message_text("send", to, label, rank_of()));
  messages->send(tensors, [&](const at::Tensor& moved) {
    TensorList list{moved};
    return backend_->send(list, static_cast<int>(to), kMessageTag);
  });
  return Pending(std::move(messages));
}

Pending ShmVerbs::recv(TensorList tensors, int64_t from, std::string label) {
  if (!are_on_cpu(tensors)) return others().recv(std::move(tensors), from, std::move(label));
  auto messages =
      std::make_unique<ShmMessages>(backend_, from, message_text("recv", from, label, rank_of()));
  messages->recv(tensors, [&](const at::Tensor& moved) {
    TensorList list{moved};
    return backend_->recv(list, static_cast<int>(from), kMessageTag);
  });
  return Pending(std::move(messages));
}

Pending ShmVerbs::barrier(std::string label) {
  return issue(std::move(label), [&] { return Works{backend_->barrier({})}; });
}

std::optional<std::string> ShmVerbs::failure() const {
  if (auto failed = backend_->host_group().failure()) return failed;
  return others_->failure();
}

void ShmVerbs::show_step(int64_t number, bool is_done) noexcept {
  backend_->host_group().show_step(static_cast<uint64_t>(number), is_done);
  others_->show_step(number, is_done);
}

std::shared_ptr<Communicator> ShmVerbs::split(const std::vector<int>& ranks,
                                              const std::string& name) {
  return others_->split(ranks, name);
}

Pending ShmVerbs::issue(std::string label, const std::function<Works()>& submit) {
  const ShmBackend::ScopedLabel scope(std::move(label));
  return Pending(std::make_unique<ShmState>(submit()));
}

SharedMemory ShmVerbs::memory_of(shm::SharedSegment shared) {
  if (!shared.segment) return {nullptr, std::move(shared.why_not)};
  return {std::make_shared<const shm::Segment>(std::move(shared.segment)), {}};
}

Communicator& ShmVerbs::others() {
  uses_others_ = true;
  return *others_;
}

}  // namespace trireme
