#pragma once

#include <trireme/comm/deposit_stream.h>
#include <trireme/comm/pending.h>
#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

namespace shm {
class HostGroup;
class Segment;
}  // namespace shm

// Is memory that all ranks of a group map; or none, and why.
struct SharedMemory {
  std::shared_ptr<const shm::Segment> segment = nullptr;
  std::string why_not = "the ranks do not share the memory of one host";
};

// Is memory that the ranks of a host map, where a group may have several hosts.
struct HostMemory {
  SharedMemory memory = {};
  RankOf where = {};  // this rank, among those that map it
};

// Lists CPU tensors, by the rank of a group that has their values.
using PartsByRank = std::vector<std::vector<at::Tensor>>;

// Is what ranks of a communicator can do because they share the memory of a host: all of them, or,
// on several hosts, those of each. Every function but group() is collective over the communicator,
// in one order with its verbs, and throws what a verb throws. One thread at a time may use it.
class TRIREME_API Host {
 public:
  virtual ~Host() = default;

  // Returns the ranks of this host as shared memory knows them.
  virtual shm::HostGroup& group() = 0;

  // Makes a stream that deposits and collects (deposit_stream.h) through rings of `bytes` per rank.
  // Null on all ranks where there are several hosts, or where a rank sees that their threads leave
  // CPUs free: then a thread of the engine may as well move the data. Who wants deposits whoever
  // moves them says `also_with_free_cpus`.
  virtual std::unique_ptr<DepositStream> make_deposit_stream(int64_t bytes,
                                                             bool also_with_free_cpus) = 0;

  // Makes one run of `bytes` zeros (> 0, the same on all ranks) for all ranks, each rank's part of
  // its pages on that rank's NUMA node. It lives as long as anybody holds it. Where one rank cannot
  // have it none has, all are told the same reason, and the group goes on. In a forked child it is
  // the parent's, not a copy.
  virtual SharedMemory share_memory(int64_t bytes, std::string label) = 0;
  // Makes one run for the ranks of each host, those of group(). Where one rank cannot have it, on
  // any host, none has.
  virtual HostMemory share_host_memory(int64_t bytes, std::string label) = 0;

  // Brings what each rank has to all, where it lies in memory of share_host_memory() already:
  // parts[r] are what rank r of the communicator has, contiguous. Parts of other hosts come to
  // their places, each byte once per host; of this host's nothing moves. Finished when all is
  // there.
  virtual Pending all_gather_in_host(PartsByRank parts, std::string label) = 0;
};

}  // namespace trireme
