#pragma once

#include <trireme/comm/communicator.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

namespace trireme {

// Makes the communicator of a group with its Store.
using MakeCommunicator = std::shared_ptr<Communicator>(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                       c10::intrusive_ptr<c10d::Store> store);

// A Communicator over any c10d ProcessGroup: Gloo, NCCL, MPI, UCC, fake, or one of torch's
// wrappers. Goes through the ProcessGroup and its dispatcher, so that torch's hooks and recorders
// see every collective.
//
// `store` is the Store of that group (ranks leave word there when a collective fails); it may be
// null, then errors name this rank only. The communicator shares ownership of both. `make_of_part`
// makes those of the groups that are split off this one.
//
// Cost per verb: one collective per list of one contiguous tensor, and for longer lists one
// collective and one flat copy each way per dtype and device (broadcast: per device, whatever the
// dtypes). all_gather and reduce_scatter copy nothing where the engine takes lists (NCCL); over
// Gloo see [Note: pieces over Gloo]: reduce_scatter takes as much memory as its inputs.
std::shared_ptr<Communicator> make_c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                     c10::intrusive_ptr<c10d::Store> store,
                                                     MakeCommunicator* make_of_part);

}  // namespace trireme
