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
// writes its shards, and it is version k + 1. A rank is at one of two things:
//
//   writing   from begin_writing() on: no rank of the host reads any more
//   reading   from begin_reading() on: all ranks have written
//
// Both wait for counters and are no collectives. begin_reading() says "version k is written" and
// waits until all have said so; a second forward of the same version says and waits for nothing, so
// forwards without backward, and more of them on one rank than on another, are right by
// construction. begin_writing() says "I read nothing of version k" and waits until all have.
//
// Of a group on several hosts each has a store. There begin_reading(), if this rank is writing, is
// one collective, which brings to each host what the ranks of the others have written; then "all"
// are all ranks of the group. begin_writing() is the business of each host.
//
// The first version is what ranks write before their first forward.
class TRIREME_API StepGate {
 public:
  // `store`: whose counters are used; shared by the ranks of this host, or of one rank; null where
  // nobody reads what another one writes, and nothing is waited for. `parts`: on several hosts,
  // what each rank writes and others read; see Host::all_gather_in_host.
  StepGate(std::shared_ptr<HostStore> store, std::shared_ptr<Communicator> communicator,
           PartsByRank parts = {});

  bool is_writing() const { return is_writing_; }
  // Returns the number of what is being written or read; counts from 1.
  uint64_t version() const { return version_; }

  // Says that others may read what this rank wrote, if it is writing, and waits until all have said
  // so. Throws c10::DistBackendError if a rank has died, failed, or not come before the group's
  // timeout. May be called again then.
  void begin_reading();
  // Waits until nobody reads, if this rank is reading. Throws as begin_reading(). `factor` is what
  // this rank has multiplied its gradients by. Returns what lies in the factors of all ranks of
  // this host: nothing, if they do not agree; all numbers if this rank is writing, or there is
  // nobody to ask.
  FactorRange begin_writing(const FactorRange& factor = {});

 private:
  std::shared_ptr<HostStore> store_;
  std::shared_ptr<Communicator> communicator_;
  PartsByRank parts_;  // empty on one host
  uint64_t version_ = 1;
  bool is_writing_ = true;
};

}  // namespace trireme
