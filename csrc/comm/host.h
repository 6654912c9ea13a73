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

// Memory that all ranks of a group map; or none, and the reason.
struct SharedMemory {
  std::shared_ptr<const shm::Segment> segment = nullptr;
  std::string why_not = "the ranks do not share the memory of one host";
};

// Memory that the ranks of one host map, in a group that may have several hosts.
struct HostMemory {
  SharedMemory memory = {};
  RankOf where = {};  // this rank, among those that map it
};

// CPU tensors, by the rank that holds their values.
using PartsByRank = std::vector<std::vector<at::Tensor>>;

// The operations of ranks that share the memory of a host: all ranks of a communicator, or, on
// several hosts, those of each. Every function but group() is collective over the communicator, in
// one order with its verbs, and throws what a verb throws. One thread at a time may use it.
class TRIREME_API Host {
 public:
  virtual ~Host() = default;

  // Returns the ranks of this host as a group of shm/.
  virtual shm::HostGroup& group() = 0;

  // Makes a stream of deposits (deposit_stream.h) through rings of `bytes` per rank. Returns null
  // on all ranks if there are several hosts, or if a rank sees that their threads leave CPUs free:
  // then a thread of the engine may as well move the data. `also_with_free_cpus` asks for a stream
  // in that case, too.
  virtual std::unique_ptr<DepositStream> make_deposit_stream(int64_t bytes,
                                                             bool also_with_free_cpus) = 0;

  // Makes one run of `bytes` zeros (> 0, the same on all ranks) for all ranks, each rank's part of
  // its pages on that rank's NUMA node. It lives as long as anything holds it. If one rank cannot
  // have it none has, all get the same reason, and the group goes on. In a forked child it is the
  // parent's memory, not a copy.
  virtual SharedMemory share_memory(int64_t bytes, std::string label) = 0;
  // Makes one run for the ranks of each host, those of group(). If one rank cannot have it, on any
  // host, none has.
  virtual HostMemory share_host_memory(int64_t bytes, std::string label) = 0;

  // Brings the values of each rank to all hosts, in memory of share_host_memory(): parts[r] are the
  // values of rank r of the communicator, contiguous. Parts of other hosts are copied to their
  // places, each byte once per host; parts of this host stay where they are. Finished when all
  // parts are there.
  virtual Pending all_gather_in_host(PartsByRank parts, std::string label) = 0;
};

}  // namespace trireme
