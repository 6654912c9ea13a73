#pragma once

#include <trireme/comm/backend/shm_backend_class.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace trireme {

// A tensor of each rank that all ranks of a host map: put() is a copy, signal() a counter. Tensors
// are contiguous and lie in memory of Backend::allocateTensor; shapes and dtypes may differ by
// rank.
//
// A put before a signal is visible to the peer after the wait_signal() that takes it: each takes
// one, in the order of the calls. The program must order a peer's reads and writes of its own
// tensor itself.
//
// Making a window, tensor_register() and tensor_deregister() are collective, in the order of the
// group's operations; a rank that cannot take part makes all raise. Errors: wrong arguments raise
// ValueError here; a peer that is lost or late raises DistBackendError, and ends the group, but for
// a timeout of Work::wait() alone. put and signal are done when they return. Thread-safe but for
// those three. Keeps the backend alive.
class ShmWindow final : public Window {
 public:
  explicit ShmWindow(c10::intrusive_ptr<ShmBackend> backend);

  void tensor_register(const at::Tensor& tensor, bool owning) TRIREME_WINDOW_OVERRIDE;
  void tensor_deregister() TRIREME_WINDOW_OVERRIDE;
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t rank, int64_t offset,
                                     bool asynchronous,
                                     const PutOptions& options) TRIREME_WINDOW_OVERRIDE;
  at::Tensor map_remote_tensor(int64_t rank) TRIREME_WINDOW_OVERRIDE;
  c10::intrusive_ptr<c10d::Work> signal(int64_t peer, bool asynchronous,
                                        const SignalOptions& options) TRIREME_WINDOW_OVERRIDE;
  c10::intrusive_ptr<c10d::Work> wait_signal(
      int64_t peer, bool asynchronous, const WaitSignalOptions& options) TRIREME_WINDOW_OVERRIDE;
  WindowAttr get_attr(int64_t peer) TRIREME_WINDOW_OVERRIDE;

 private:
  class SignalWork;
  struct Place;
  // A rank's tensor, as this rank sees it.
  struct View {
    std::shared_ptr<const shm::Segment> segment;
    at::Tensor tensor;
  };
  struct Signals;

  void check_rank(int64_t rank, const char* verb) const;
  void check_usable() const;
  at::Tensor tensor_of(int64_t rank, const char* verb);

  c10::intrusive_ptr<ShmBackend> backend_;
  std::shared_ptr<Signals> signals_;
  std::mutex mutex_;
  std::vector<View> views_;  // one per rank; empty without a registered tensor
};

}  // namespace trireme
