#pragma once

#include <trireme/comm/communicator.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

namespace trireme {

// Makes the communicator of a group with its Store.
using MakeCommunicator = std::shared_ptr<Communicator>(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                       c10::intrusive_ptr<c10d::Store> store);

struct C10dRequest {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  // The Store of that group: ranks leave messages there when a collective fails. If it is null,
  // errors name this rank only.
  c10::intrusive_ptr<c10d::Store> store;
  bool is_gloo = false;                      // Gloo moves the group's CPU tensors, by whatever name
  MakeCommunicator* make_of_part = nullptr;  // for the groups that are split off this one
};

// Makes a Communicator over any c10d ProcessGroup: Gloo, NCCL, MPI, UCC, fake, or one of torch's
// wrappers. Goes through the ProcessGroup and its dispatcher, so that torch's hooks and recorders
// see every collective.
//
// Shares ownership of the group and the Store.
//
// Cost per verb: one collective per list of one contiguous tensor, and for longer lists one
// collective and one flat copy each way per dtype, device and 64 MiB (broadcast: whatever the
// dtypes). all_gather and reduce_scatter copy nothing if the engine takes lists (NCCL); over Gloo
// see [Note: pieces over Gloo]: reduce_scatter takes as much memory as its inputs.
std::shared_ptr<Communicator> make_c10d_communicator(C10dRequest request);

}  // namespace trireme
