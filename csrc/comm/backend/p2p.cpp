#include <trireme/comm/backend/p2p.h>

#include <trireme/comm/backend/arguments.h>
#include <trireme/comm/backend/torch_compat.h>
#include <trireme/comm/backend/work_future.h>
#include <trireme/comm/shm_tensors.h>
#include <trireme/comm/translate_faults.h>
#include <trireme/common/duration.h>
#include <trireme/common/error.h>

#include <ATen/core/grad_mode.h>

#include <exception>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace trireme {
namespace {

using shm::Transfer;
using std::chrono::milliseconds;
using Use = ShmTensors::Use;

constexpr const char* kP2pArea = "shm_p2p";

std::exception_ptr as_c10d_error(const std::string& text) {
  try {
    C10_THROW_ERROR(DistBackendError, text);
  } catch (...) {
    return std::current_exception();
  }
}

// One send or recv. A thread that waits for it moves it.
class P2pWork final : public c10d::Work {
 public:
  P2pWork(shm::HostGroup& group, c10d::OpType type, const char* title, at::Tensor tensor,
          uint64_t sequence)
      : Work(static_cast<int>(group.where().rank), type, title, std::vector<at::Tensor>{tensor}),
        group_(group),
        where_(group.where()),
        sequence_(sequence),
        tensor_(std::move(tensor)),
        memory_(tensor_, type == c10d::OpType::SEND ? Use::kRead : Use::kWrite),
        transfer_(std::make_shared<Transfer>()) {}

  Transfer& transfer() { return *transfer_; }

  void post(std::shared_ptr<shm::Courier> courier, std::shared_ptr<ShmHooks> hooks) {
    courier_ = std::move(courier);
    hooks_ = std::move(hooks);
    transfer_->memory = memory_.pieces();
    // The transfer keeps this alive as long as it moves.
    const auto self = c10::intrusive_ptr<P2pWork>::reclaim_copy(this);
    transfer_->on_done = [self](const Transfer& transfer) { self->complete(transfer); };
    transfer_->after_done = [self] { self->run_callbacks(); };
    courier_->post(transfer_);
  }

  bool wait(milliseconds timeout) override {
    std::optional<shm::Clock::time_point> until;
    if (timeout != kNoTimeout) until = deadline_after(timeout);
    if (!courier_->wait(*transfer_, until)) {
      C10_THROW_ERROR(
          DistBackendError,
          error_text(kP2pArea,
                     std::string(retrieveOpType() == c10d::OpType::SEND ? "send" : "recv") +
                         " is not done after a wait of " + std::to_string(timeout.count()) + " ms",
                     where_, "Wait longer; it goes on."));
    }
    return Work::wait(kNoTimeout);
  }

  bool isCompleted() override {
    if (!transfer_->is_done()) courier_->poll();
    return Work::isCompleted();
  }

  uint64_t getSequencenumber() const override { return sequence_; }
  uint64_t getCompletionKey() const TRIREME_HOOKS_OVERRIDE { return key_; }
  int sourceRank() const override { return static_cast<int>(transfer_->source); }
  std::vector<at::Tensor> result() override { return {tensor_}; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      future_ = make_work_future();
      if (Work::isCompleted()) complete_future(*future_, exception(), result());
    }
    return future_;
  }

 private:
  void complete(const Transfer& transfer) {
    finished_ = shm::Clock::now();
    std::exception_ptr error;
    try {
      const at::NoGradGuard no_grad;
      if (transfer.fault) {
        if (group_.failure()) hooks_->failed(*transfer.fault);  // not if this rank just leaves
        error = as_c10d_error(transfer.fault->what());
      } else {
        memory_.write_back();
      }
    } catch (...) {
      error = std::current_exception();
    }
    finish(error);
  }

  void run_callbacks() {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard<std::mutex> lock(future_mutex_);
      future = future_;
    }
    if (future) complete_future(*future, exception(), result());
    if (!exception()) hooks_->completed({key_, opType_, sequence_, posted_, finished_});
  }

  shm::HostGroup& group_;  // until it is complete
  RankOf where_;
  uint64_t sequence_;
  uint64_t key_ = next_completion_key();
  shm::Clock::time_point posted_ = shm::Clock::now();
  shm::Clock::time_point finished_{};
  std::shared_ptr<ShmHooks> hooks_;
  at::Tensor tensor_;
  ShmTensors memory_;
  shm::TransferPtr transfer_;
  std::shared_ptr<shm::Courier> courier_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// All ShmP2p of this process that have a courier. Never destroyed: groups may outlive static
// objects.
struct Everyone {
  std::mutex mutex;
  std::set<ShmP2p*> live;
};
Everyone& everyone() {
  static auto* everyone = new Everyone;
  return *everyone;
}

}  // namespace

ShmP2p::ShmP2p(shm::HostGroup& group, std::shared_ptr<ShmHooks> hooks)
    : group_(group), hooks_(std::move(hooks)) {}

ShmP2p::~ShmP2p() {
  close();
  const std::lock_guard<std::mutex> lock(everyone().mutex);
  everyone().live.erase(this);
}

ShmP2p::WorkPtr ShmP2p::send(const std::vector<at::Tensor>& tensors, const Peer& to) {
  return post(Transfer::Kind::kSend, tensors, to);
}

ShmP2p::WorkPtr ShmP2p::recv(const std::vector<at::Tensor>& tensors, const Peer& from) {
  return post(Transfer::Kind::kRecv, tensors, from);
}

void ShmP2p::close() {
  if (fork_guard_.in_child()) return;
  std::shared_ptr<shm::Courier> courier;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    courier = courier_;
  }
  if (courier) courier->close();
}

ShmP2p::WorkPtr ShmP2p::post(Transfer::Kind kind, const std::vector<at::Tensor>& tensors,
                             const Peer& peer) {
  const bool sends = kind == Transfer::Kind::kSend;
  const RankOf where = group_.where();
  const bool exists = peer.rank >= 0 && *peer.rank < group_.world();
  ShmArguments arguments(sends ? "send" : "recv");
  arguments.take(tensors).count("tensors", tensors.size(), 1);
  arguments.expect(exists || !peer.rank, [&] { return "rank " + std::to_string(*peer.rank); });
  TORCH_CHECK_VALUE(arguments.fine(),
                    error_text(kP2pArea, arguments.complaint(), where,
                               "Pass one dense tensor on CPU and a rank of the group."));
  const auto type = sends        ? c10d::OpType::SEND
                    : !peer.rank ? c10d::OpType::RECVANYSOURCE
                                 : c10d::OpType::RECV;
  auto work = c10::make_intrusive<P2pWork>(group_, type, sends ? "trireme:send" : "trireme:recv",
                                           tensors[0], ++sequence_);
  Transfer& transfer = work->transfer();
  transfer.kind = kind;
  transfer.peer = peer.rank.value_or(shm::kAnyRank);
  transfer.tag = peer.tag;
  transfer.dtype = shm_dtype(arguments.dtype());
  transfer.timeout = peer.timeout;
  translate_faults([&] { work->post(courier(), hooks_); },
                   [&](const shm::Fault& fault) {
                     hooks_->failed(fault);
                     transfer.on_done = nullptr;  // the Work holds them, and they the Work
                     transfer.after_done = nullptr;
                   });
  return work;
}

std::shared_ptr<shm::Courier> ShmP2p::courier() {
  if (fork_guard_.in_child()) {  // where a lock may be held for ever
    throw shm::Fault(shm::FaultKind::kForked,
                     error_text(kP2pArea,
                                "got a message in a forked child of the process that made the "
                                "group",
                                group_.where(), "Use the group in the parent only."));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || !group_.has_memory()) {
    throw shm::Fault(shm::FaultKind::kNotPossible,
                     error_text(kP2pArea,
                                closed_ ? "got a message after the group ended"
                                        : "got no memory for messages: " + group_.why_alone(),
                                group_.where(), "Make another group."));
  }
  if (!courier_) {
    courier_ = std::make_shared<shm::Courier>(group_);
    const std::lock_guard<std::mutex> all(everyone().mutex);
    everyone().live.insert(this);
  }
  return courier_;
}

void close_all_p2p() {
  std::set<ShmP2p*> live;
  {
    const std::lock_guard<std::mutex> lock(everyone().mutex);
    live = everyone().live;
  }
  for (ShmP2p* transport : live) transport->close();
}

}  // namespace trireme
