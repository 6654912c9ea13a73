#pragma once

#include <trireme/comm/backend/hooks.h>
#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/shm/courier.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace trireme {

// The send and recv of the backend: messages of one tensor each, through shm::Courier. See
// shm/mailbox.h for their order and for what each costs; nothing is made before the first of them.
//
// Errors: a tensor that cannot be sent, or a rank that does not exist, raises ValueError here.
// Later errors are a DistBackendError of the Work: a message of another size or dtype than the
// recv's (the group goes on), and any failure that ends the group.
//
// Thread-safe. The host group lives until close().
class ShmP2p {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct Peer {
    std::optional<int64_t> rank;  // none: any sender; the Work knows which one in the end
    int tag;
    std::chrono::milliseconds timeout;
  };

  ShmP2p(shm::HostGroup& group, std::shared_ptr<ShmHooks> hooks);
  ~ShmP2p();
  ShmP2p(const ShmP2p&) = delete;
  ShmP2p& operator=(const ShmP2p&) = delete;

  WorkPtr send(const std::vector<at::Tensor>& tensors, const Peer& to);
  WorkPtr recv(const std::vector<at::Tensor>& tensors, const Peer& from);

  // Waits, for some seconds, until sent messages can be received; pending recvs raise.
  void close();

 private:
  WorkPtr post(shm::Transfer::Kind kind, const std::vector<at::Tensor>& tensors, const Peer& peer);
  std::shared_ptr<shm::Courier> courier();

  shm::HostGroup& group_;
  std::shared_ptr<ShmHooks> hooks_;
  std::atomic<uint64_t> sequence_{0};
  ForkGuard fork_guard_;
  std::mutex mutex_;
  std::shared_ptr<shm::Courier> courier_;
  bool closed_ = false;
};

// Calls close() on all ShmP2p of this process, which may end without having destroyed its groups.
TRIREME_API void close_all_p2p();

}  // namespace trireme
