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

// Is a one-sided reduce-scatter of ranks that share memory: each deposits what it has as soon as it
// has it, and sums up what it owns when all have deposited it. See shm/deposit_ring.h, of which
// this is the face for tensors' memory.
//
// A round is a run of bytes with the same layout on all ranks, deposited and collected from the
// first to the last. Of its calls only wait() blocks, and begin_round() after a failure. All of
// them throw c10::DistBackendError; the group can then recover. One thread at a time.
class TRIREME_API DepositStream {
 public:
  struct Round {
    int64_t bytes;
    uint64_t layout_hash;    // hash of the rest that ranks must agree about
    std::string_view label;  // what is deposited, for messages
  };

  // `group` is that of the ring; `keeps_alive` owns it.
  DepositStream(std::unique_ptr<shm::DepositRing> ring, shm::HostGroup& group,
                std::shared_ptr<void> keeps_alive);
  ~DepositStream();
  DepositStream(const DepositStream&) = delete;
  DepositStream& operator=(const DepositStream&) = delete;

  // Begins a round, of which all ranks say the same.
  void begin_round(const Round& round);

  // Returns where this rank's next bytes go: at most `bytes`, in one piece, none while the ring is
  // full. The memory is shared: write it once, then deposit() what was written.
  std::span<std::byte> room(int64_t bytes);
  void deposit(int64_t bytes);
  // Lets peers see the name of what was deposited last.
  void show(std::string_view name);

  // Sums, in rank order, the next `bytes` of `dtype` (which begin where that is aligned) into
  // `sums`, as far as all ranks have deposited them; says how many bytes that were. fp16 and bf16
  // are summed in fp32 and rounded once. Without `sums` the bytes are passed over.
  int64_t collect(std::byte* sums, at::ScalarType dtype, int64_t bytes);
  // Sums as the other collect() does, but hands the sums to `sink`, some KiB at a time while they
  // are in the nearest cache: `bytes` bytes from `offset` on. The sink may write to them.
  using Sink = std::function<void(std::byte* sums, int64_t offset, int64_t bytes)>;
  int64_t collect(const Sink& sink, at::ScalarType dtype, int64_t bytes);

  // These count the bytes of this round.
  int64_t deposited() const;
  int64_t collected() const;

  // Waits, when neither room() nor collect() had anything, until one of them may have. `name` says
  // in errors what is lacking.
  void wait(std::string_view name);

 private:
  void sum_up(std::byte* sums, at::ScalarType dtype, int64_t bytes, const Sink* sink) const;

  std::shared_ptr<void> keeps_alive_;
  std::unique_ptr<shm::DepositRing> ring_;
  int64_t world_;
  shm::HostGroup& group_;
};

}  // namespace trireme
