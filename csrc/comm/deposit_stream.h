#pragma once

#include <trireme/common/export.h>

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

namespace trireme {

namespace shm {
class DepositRing;
class HostGroup;
}  // namespace shm

// A one-sided reduce-scatter of ranks that share memory: each rank deposits its bytes as soon as it
// has them, and sums up the part that it owns when all ranks have deposited it. Wraps
// shm/deposit_ring.h for the memory of tensors.
//
// A round is a run of bytes with the same layout on all ranks, deposited and collected from the
// first to the last. Only wait() blocks, and begin_round() after a failure. Errors are
// c10::DistBackendError; the group can then recover. One thread at a time.
class TRIREME_API DepositStream {
 public:
  struct Round {
    int64_t bytes;
    uint64_t layout_hash;    // hash of all else that ranks must agree about
    std::string_view label;  // names the bytes in messages
  };

  // `group` is the ring's; `keeps_alive` owns it.
  DepositStream(std::unique_ptr<shm::DepositRing> ring, shm::HostGroup& group,
                std::shared_ptr<void> keeps_alive);
  ~DepositStream();
  DepositStream(const DepositStream&) = delete;
  DepositStream& operator=(const DepositStream&) = delete;

  // Begins a round. All ranks pass the same one.
  void begin_round(const Round& round);

  // Returns where this rank's next bytes go: at most `bytes`, in one piece, none while the ring is
  // full. The memory is shared: write it once, then call deposit() for the bytes written.
  std::span<std::byte> room(int64_t bytes);
  void deposit(int64_t bytes);
  // Shows peers the name of what was deposited last.
  void show(std::string_view name);

  // Sums, in rank order, the next `bytes` of `dtype` (which begin where that is aligned) into
  // `sums`, as far as all ranks have deposited them; returns how many bytes that were. fp16 and
  // bf16 are summed in fp32 and rounded once. A null `sums` skips the bytes.
  int64_t collect(std::byte* sums, at::ScalarType dtype, int64_t bytes);
  // Sums as the other collect() does, but hands the sums to `sink`, some KiB at a time while they
  // are in the nearest cache: `bytes` bytes from `offset` on. The sink may write to them.
  using Sink = std::function<void(std::byte* sums, int64_t offset, int64_t bytes)>;
  int64_t collect(const Sink& sink, at::ScalarType dtype, int64_t bytes);

  // Return how many bytes of this round were deposited or collected.
  int64_t deposited() const;
  int64_t collected() const;

  // Waits, when neither room() nor collect() had anything, until one of them may have. `name` says
  // in errors which bytes are missing.
  void wait(std::string_view name);

 private:
  void sum_up(std::byte* sums, at::ScalarType dtype, int64_t bytes, const Sink* sink) const;

  std::shared_ptr<void> keeps_alive_;
  std::unique_ptr<shm::DepositRing> ring_;
  int64_t world_;
  shm::HostGroup& group_;
};

}  // namespace trireme
