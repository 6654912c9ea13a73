#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/host.h>
#include <trireme/common/export.h>
#include <trireme/memory/host_store.h>

#include <cstdint>
#include <memory>

namespace trireme {

// [Note: who reads and who writes what a host has once]
//
// Parameters go through versions. Version k is read by forwards and backwards; then every rank
// writes its shards, and it is version k + 1. A rank is in one of two states:
//
//   writing   from begin_writing() on: no rank of the host reads any more
//   reading   from begin_reading() on: all ranks have written
//
// Both wait for counters and are no collectives. begin_reading() publishes "version k is written"
// and waits until all have done so; a second forward of the same version publishes and waits for
// nothing, so forwards without backward, and more of them on one rank than on another, are right by
// construction. begin_writing() publishes "I read nothing of version k" and waits until all have.
//
// In a group on several hosts each has a store. There begin_reading(), if this rank is writing, is
// one collective, which brings the writes of other hosts' ranks to each host; then "all" are all
// ranks of the group. begin_writing() stays within each host.
//
// The first version is what ranks write before their first forward.
class TRIREME_API StepGate {
 public:
  // `store`: its counters are used; shared by the ranks of this host, or of one rank; null if no
  // rank reads another's writes, and nothing is waited for. `parts`: on several hosts, the tensors
  // that each rank writes and others read; see Host::all_gather_in_host.
  StepGate(std::shared_ptr<HostStore> store, std::shared_ptr<Communicator> communicator,
           PartsByRank parts = {});

  bool is_writing() const { return is_writing_; }
  // Returns the number of the version that is written or read; counts from 1.
  uint64_t version() const { return version_; }

  // Lets others read this rank's writes, if it is writing, and waits until all have done so. Throws
  // c10::DistBackendError if a rank has died, failed, or not come before the group's timeout. May
  // be called again then.
  void begin_reading();
  // Waits until no rank reads, if this rank is reading. Throws as begin_reading(). `factor` is the
  // factor of this rank's gradients. Returns the intersection of the factors of all ranks of this
  // host: empty if they do not agree; all numbers if this rank is writing, or has no peers to ask.
  FactorRange begin_writing(const FactorRange& factor = {});

 private:
  std::shared_ptr<HostStore> store_;
  std::shared_ptr<Communicator> communicator_;
  PartsByRank parts_;  // empty on one host
  uint64_t version_ = 1;
  bool is_writing_ = true;
};

}  // namespace trireme
