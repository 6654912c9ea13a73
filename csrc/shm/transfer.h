#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/dtype.h>
#include <trireme/shm/fault.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/shm/pieces.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace trireme::shm {

constexpr int64_t kAnyRank = -1;

// One message on its way: a send or a recv, from when it is posted until it is done. Made by the
// caller, who leaves it and `memory` alone until is_done().
struct Transfer {
  enum class Kind : uint8_t { kSend, kRecv };

  Kind kind = Kind::kSend;
  int64_t peer = 0;  // rank of the host group; to receive also kAnyRank
  int64_t tag = 0;
  Pieces memory;
  Dtype dtype = Dtype::kBytes;
  std::chrono::milliseconds timeout{0};  // 0: the group's
  // Each called once, on the thread that moved the last byte, without a lock held; must not throw.
  // on_done comes before is_done(). after_done comes when all transfers that ended together are
  // done, so it may wait for any of them.
  std::function<void(const Transfer&)> on_done{};
  std::function<void()> after_done{};

  // The sender, and the error if any; valid from on_done on.
  int64_t source = kAnyRank;
  std::optional<Fault> fault;

  bool is_done() const { return done.load(std::memory_order_seq_cst); }

  // Used by the mailbox and the courier alone.
  Clock::time_point deadline{};
  int64_t moved = 0;
  std::atomic<bool> done{false};
};

using TransferPtr = std::shared_ptr<Transfer>;

}  // namespace trireme::shm
