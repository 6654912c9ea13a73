#pragma once

#include <trireme/comm/deposit_stream.h>
#include <trireme/comm/pending.h>
#include <trireme/common/error.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

namespace shm {
class HostGroup;
class Segment;
}  // namespace shm

// Memory that all ranks of a group map; or none, and why.
struct SharedMemory {
  std::shared_ptr<const shm::Segment> segment;
  std::string why_not;
};

// The same of the ranks of each host, where a group may have several.
struct HostMemory {
  SharedMemory memory = {};
  RankOf where = {};  // this rank, among those that map it
};

// CPU tensors, by the rank of a group that has their values.
using PartsByRank = std::vector<std::vector<at::Tensor>>;

// Averages are not here: the division belongs to grad/grad_reducer.
enum class ReduceOp : uint8_t { kSum, kMin, kMax };

// What a strategy may ask of a group of ranks. Every verb takes a list of tensors (an engine
// coalesces what it can), is collective (all ranks of the group call it in the same order with the
// same shapes and dtypes), returns at once, and is finished by Pending::wait. The tensors stay
// alive as long as the Pending does. `label` names what is moved ("bucket 3: layer.1.weight ..
// layer.2.bias"); errors and traces repeat it.
//
// Failures: a verb, or the wait for it, throws c10::DistBackendError naming operation, label and
// rank; after that, or after a peer announced its failure, every further verb throws at once, until
// recover(). A group that cannot recover (any but ours of shared memory; and that one if a rank is
// gone or came too late) must be rebuilt.
//
// One thread at a time may use a Communicator.
class TRIREME_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual RankOf rank_of() const = 0;
  int64_t rank() const { return rank_of().rank; }
  int64_t world() const { return rank_of().world; }

  // In place. Dense tensors of any floating, complex or integral dtype; a sparse tensor must be
  // alone in its list.
  virtual Pending all_reduce(std::vector<at::Tensor> tensors, ReduceOp op, std::string label) = 0;

  // In place; what `root` holds is what all ranks hold afterwards.
  virtual Pending broadcast(std::vector<at::Tensor> tensors, int64_t root, std::string label) = 0;

  // outputs[i] holds world x inputs[i].numel() elements, rank-major; both contiguous.
  virtual Pending all_gather(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                             std::string label) = 0;

  // inputs[i] holds world x outputs[i].numel() elements, rank-major; both contiguous.
  virtual Pending reduce_scatter(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                                 ReduceOp op, std::string label) = 0;

  virtual Pending barrier(std::string label) = 0;

  // Tells the other ranks, outside any collective, that this rank has left the common sequence of
  // collectives, and why. Their waits raise with this text. Never throws; safe from a destructor.
  virtual void announce_failure(const std::string& reason) noexcept = 0;

  // Collective, once every rank has announced a failure or thrown because of one: what was in
  // flight is given up, and the group works again. Nothing happens where none did, or where the
  // group cannot recover.
  virtual void recover() {}

  // Why this group can no longer be used, if so.
  virtual std::optional<std::string> failure() const = 0;

  // The ranks of this host as shared memory knows them: all of the group, or on several hosts those
  // of this one; null where ranks share none. Lives as long as the communicator.
  virtual shm::HostGroup* host_group() { return nullptr; }

  // Collective. Deposit and collect (deposit_stream.h) through rings of `bytes` per rank; null on
  // all ranks where they do not share memory, or where one of them sees that their threads leave
  // CPUs free: then a thread of the engine may as well move the data. Who wants deposits whoever
  // moves them says `also_with_free_cpus`.
  virtual std::unique_ptr<DepositStream> make_deposit_stream(int64_t /*bytes*/,
                                                             bool /*also_with_free_cpus*/ = false) {
    return nullptr;
  }

  // Collective: one run of `bytes` zeros (> 0, the same on all ranks) for all of them, each rank's
  // part of its pages on that rank's NUMA node. Lives as long as anybody holds it. Where one rank
  // cannot have it none has, all are told the same reason, and the group goes on; throws what a
  // verb throws. In a forked child it is the parent's, not a copy.
  virtual SharedMemory share_memory(int64_t /*bytes*/, std::string /*label*/) {
    return {nullptr, "the ranks do not share the memory of one host"};
  }
  // The same for the ranks of each host, those of host_group(). Where one rank cannot have it, on
  // any host, none has.
  virtual HostMemory share_host_memory(int64_t bytes, std::string label) {
    return {share_memory(bytes, std::move(label)), rank_of()};
  }

  // What each rank has, brought to all, where it lies in memory of share_host_memory() already:
  // parts[r] are what rank r of the group has, contiguous. Those of other hosts come to their
  // places, each byte once per host; of this host's nothing moves. Finished when all is there.
  virtual Pending all_gather_in_host(PartsByRank /*parts*/, std::string label) {
    return barrier(std::move(label));
  }
};

}  // namespace trireme
