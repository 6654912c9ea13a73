#include <trireme/comm/backend/window.h>

#include <trireme/comm/backend/memory.h>
#include <trireme/comm/translate_faults.h>
#include <trireme/common/resolved.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

namespace trireme {

using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

constexpr const char* kWindowArea = "shm_window";
constexpr size_t kMaxDims = 16;

struct alignas(shm::kCacheLine) Count {
  std::atomic<uint64_t> value{0};
};

// Calls `call`; a fault in it is the backend's, too, unless only the caller's timeout was over.
template <typename Call>
void noted_by(ShmBackend& backend, Call&& call, bool is_impatient = false) {
  translate_faults(call, [&](const shm::Fault& fault) {
    if (!is_impatient || fault.kind() != shm::FaultKind::kTimeout) backend.note(fault);
  });
}

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(int rank) : Work(rank, c10d::OpType::UNKNOWN) { finish(); }
};

template <typename Place>
shm::Pieces pieces_of(Place& place) {
  return {reinterpret_cast<std::byte*>(&place), static_cast<int64_t>(sizeof(place))};
}

template <typename Place>
std::vector<Place> gather(shm::Collectives& collectives, Place& mine,
                          const shm::CallOptions& call) {
  std::vector<Place> all(static_cast<size_t>(collectives.group().world()));
  std::vector<shm::Pieces> outputs;
  for (Place& place : all) outputs.push_back(pieces_of(place));
  collectives.all_gather(outputs, pieces_of(mine), shm::Dtype::kBytes, call);
  return all;
}

}  // namespace

// The place of a rank's tensor, as it tells its peers.
struct ShmWindow::Place {
  std::array<char, 192> address{};  // the segment's address
  int64_t offset = 0;               // bytes in it
  int64_t dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  int64_t dtype = 0;
};

// The reason why a peer's tensor could not be opened.
struct Obstacle {
  std::array<char, 256> why{};
};

// A segment of each rank with a counter for each peer, which only that rank writes.
struct ShmWindow::Signals {
  std::vector<shm::Segment> segments;
  std::vector<std::atomic<uint64_t>> taken;  // signals that wait_signal() took, per peer

  std::atomic<uint64_t>& from_to(int64_t from, int64_t to) {
    auto* counts =
        std::launder(reinterpret_cast<Count*>(segments[static_cast<size_t>(from)].data()));
    return counts[to].value;
  }
};

// A wait_signal(): waiting for the Work waits for the signal.
class ShmWindow::SignalWork final : public c10d::Work {
 public:
  SignalWork(c10::intrusive_ptr<ShmBackend> backend, std::shared_ptr<Signals> signals, int64_t peer,
             milliseconds timeout)
      : Work(backend->getRank(), c10d::OpType::UNKNOWN),
        backend_(std::move(backend)),
        signals_(std::move(signals)),
        peer_(peer),
        timeout_(timeout),
        target_(++signals_->taken[static_cast<size_t>(peer)]) {}

  bool isCompleted() override {
    if (count().load(std::memory_order_acquire) >= target_) finish();
    return Work::isCompleted();
  }

  bool wait(milliseconds timeout) override {
    const bool limited = timeout != kNoTimeout;
    const std::string name = "the signal of a window from rank " + std::to_string(peer_);
    noted_by(
        *backend_,
        [&] {
          backend_->host_group().check_usable();
          backend_->host_group().wait_beside(peer_, count(), target_,
                                             {name, limited ? timeout : timeout_, limited});
        },
        limited);
    if (!Work::isCompleted()) finish();
    return true;
  }

 private:
  std::atomic<uint64_t>& count() { return signals_->from_to(peer_, rank_); }

  c10::intrusive_ptr<ShmBackend> backend_;
  std::shared_ptr<Signals> signals_;
  int64_t peer_;
  milliseconds timeout_;
  uint64_t target_;
};

ShmWindow::ShmWindow(c10::intrusive_ptr<ShmBackend> backend)
    : backend_(std::move(backend)), signals_(std::make_shared<Signals>()) {
  const auto world = static_cast<size_t>(backend_->getSize());
  signals_->taken = std::vector<std::atomic<uint64_t>>(world);
  backend_->run_in_order(
      "trireme:new_window", [&](shm::Collectives& collectives, const shm::CallOptions& call) {
        signals_->segments =
            collectives.share_segments(static_cast<int64_t>(world * sizeof(Count)), call);
        shm::Segment& own = signals_->segments[static_cast<size_t>(backend_->getRank())];
        for (size_t peer = 0; peer < world; ++peer) new (own.data() + peer * sizeof(Count)) Count;
        collectives.barrier(call);  // before any rank waits for one of them
      });
}

void ShmWindow::tensor_register(const at::Tensor& tensor, bool owning) {
  const auto segment = segment_of(tensor);
  std::string complaint;
  if (!segment) complaint = "a window got a tensor in private memory";
  if (segment && !lies_plain(tensor)) complaint = "a window got a tensor with gaps or lazy minus";
  if (segment && tensor.dim() > static_cast<int64_t>(kMaxDims))
    complaint = "a window got " + std::to_string(tensor.dim()) + " dimensions";
  Place mine;
  if (complaint.empty()) {
    const std::string address = segment->address().to_string();
    std::copy_n(address.begin(), std::min(address.size(), mine.address.size() - 1),
                mine.address.begin());
    mine.offset = static_cast<const std::byte*>(tensor.const_data_ptr()) - segment->data();
    mine.dims = tensor.dim();
    std::copy_n(tensor.sizes().begin(), tensor.dim(), mine.sizes.begin());
    mine.dtype = static_cast<int64_t>(tensor.scalar_type());
  }
  std::vector<View> views;
  backend_->run_in_order(
      "trireme:window_register", [&](shm::Collectives& collectives, const shm::CallOptions& call) {
        if (!complaint.empty())
          collectives.refuse(complaint + "; it takes one of allocate_tensor", call);
        const std::vector<Place> places = gather(collectives, mine, call);
        Obstacle obstacle;
        for (size_t rank = 0; rank < places.size(); ++rank) {
          const Place& place = places[rank];
          std::string why_not = "its address is unreadable";
          auto theirs = owning ? segment : nullptr;
          auto* data = static_cast<std::byte*>(segment->data());
          if (rank != static_cast<size_t>(backend_->getRank())) {
            const auto address = shm::SegmentAddress::parse(place.address.data());
            auto opened = std::make_shared<shm::Segment>();
            if (address) *opened = shm::Segment::open(*address, why_not);
            if (!*opened) {
              why_not = "rank " + std::to_string(backend_->getRank()) + ": " + why_not;
              std::copy_n(why_not.begin(), std::min(why_not.size(), obstacle.why.size() - 1),
                          obstacle.why.begin());
              continue;
            }
            data = opened->data();
            theirs = std::move(opened);
          }
          const at::IntArrayRef sizes(place.sizes.data(), static_cast<size_t>(place.dims));
          const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(place.dtype));
          views.push_back(
              {theirs, at::from_blob(data + place.offset, sizes, [theirs](void*) {}, options)});
        }
        for (const Obstacle& told : gather(collectives, obstacle, call)) {
          if (told.why[0] == '\0') continue;
          throw shm::Fault(
              shm::FaultKind::kNotPossible,
              error_text(kWindowArea, "a tensor cannot be shared: " + std::string(told.why.data()),
                         backend_->host_group().where(),
                         "Look at the limits on open files and memory, and let the ranks "
                         "open each other's memory through /proc."));
        }
      });
  const std::lock_guard<std::mutex> lock(mutex_);
  views_ = std::move(views);
  if (owning) views_[static_cast<size_t>(backend_->getRank())].tensor = tensor;
}

void ShmWindow::tensor_deregister() {
  backend_->run_in_order("trireme:window_deregister",
                         [](shm::Collectives& collectives, const shm::CallOptions& call) {
                           collectives.barrier(call);
                         });
  std::vector<View> views;
  const std::lock_guard<std::mutex> lock(mutex_);
  views.swap(views_);
}

WorkPtr ShmWindow::put(const at::Tensor& tensor, int64_t rank, int64_t offset,
                       bool /*asynchronous*/, const PutOptions& /*options*/) {
  const at::NoGradGuard no_grad;
  const at::Tensor target = tensor_of(rank, "put");
  const auto where = backend_->host_group().where();
  TORCH_CHECK_VALUE(tensor.scalar_type() == target.scalar_type() && tensor.device().is_cpu(),
                    error_text(kWindowArea,
                               std::string("put got ") + c10::toString(tensor.scalar_type()) +
                                   ", but the window of rank " + std::to_string(rank) + " holds " +
                                   c10::toString(target.scalar_type()),
                               where, "Put what that rank registered."));
  const int64_t numel = tensor.numel();
  TORCH_CHECK_VALUE(
      offset >= 0 && offset <= target.numel() - numel,
      error_text(kWindowArea,
                 "put got " + std::to_string(numel) + " elements at " + std::to_string(offset) +
                     ", but the window of rank " + std::to_string(rank) + " holds " +
                     std::to_string(target.numel()),
                 where, "Stay inside of it."));
  target.view(-1).narrow(0, offset, numel).copy_(tensor.reshape(-1));
  return c10::make_intrusive<DoneWork>(backend_->getRank());
}

at::Tensor ShmWindow::map_remote_tensor(int64_t rank) {
  return tensor_of(rank, "map_remote_tensor");
}

WorkPtr ShmWindow::signal(int64_t peer, bool /*asynchronous*/, const SignalOptions& /*options*/) {
  check_rank(peer, "signal");
  check_usable();
  signals_->from_to(backend_->getRank(), peer).fetch_add(1, std::memory_order_seq_cst);
  backend_->host_group().wake_peers();
  return c10::make_intrusive<DoneWork>(backend_->getRank());
}

WorkPtr ShmWindow::wait_signal(int64_t peer, bool asynchronous, const WaitSignalOptions& options) {
  check_rank(peer, "wait_signal");
  check_usable();
  const bool limited = options.timeout != c10d::kUnsetTimeout;
  const milliseconds timeout = limited ? options.timeout : backend_->getBackendOptions()->timeout;
  auto work = c10::make_intrusive<SignalWork>(backend_, signals_, peer, timeout);
  if (!asynchronous) work->wait(kNoTimeout);
  return work;
}

WindowAttr ShmWindow::get_attr(int64_t peer) {
  check_rank(peer, "get_attr");
  return {WindowAccessType::UNIFIED};
}

void ShmWindow::check_rank(int64_t rank, const char* verb) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < backend_->getSize(),
                    error_text(kWindowArea, std::string(verb) + " got rank " + std::to_string(rank),
                               backend_->host_group().where(), "Pass a rank of the group."));
}

void ShmWindow::check_usable() const {
  noted_by(*backend_, [&] { backend_->host_group().check_usable(); });
}

at::Tensor ShmWindow::tensor_of(int64_t rank, const char* verb) {
  check_rank(rank, verb);
  check_usable();
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(!views_.empty(),
                    error_text(kWindowArea, std::string(verb) + " got a window without a tensor",
                               backend_->host_group().where(), "Call tensor_register first."));
  return views_[static_cast<size_t>(rank)].tensor;
}

}  // namespace trireme
