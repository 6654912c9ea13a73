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

// Is one message on its way: a send or a recv, from when it is posted until it is done. Made by the
// caller, who leaves it and `memory` alone until is_done().
struct Transfer {
  enum class Kind : uint8_t { kSend, kRecv };

  Kind kind = Kind::kSend;
  int64_t peer = 0;  // rank of the host group; to receive also kAnyRank
  int64_t tag = 0;
  Pieces memory;
  Dtype dtype = Dtype::kBytes;
  std::chrono::milliseconds timeout{0};  // 0: the group's
  // Called once, before is_done(), on whichever thread moved the last byte, without a lock held.
  // Must not throw.
  std::function<void(const Transfer&)> on_done{};

  // These say, from on_done on, who sent it and what went wrong.
  int64_t source = kAnyRank;
  std::optional<Fault> fault;

  bool is_done() const { return done.load(std::memory_order_seq_cst); }

  // What follows is the mailbox's and the courier's own.
  Clock::time_point deadline{};
  int64_t moved = 0;
  std::atomic<bool> done{false};
};

using TransferPtr = std::shared_ptr<Transfer>;

}  // namespace trireme::shm
