#pragma once

#include <trireme/comm/communicator.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

namespace trireme {

// Makes a Communicator over `group`, of any backends (c10d/c10d_communicator.h). Tensors that the
// backend "trireme" would move through shared memory go there directly
// (backend/shm_communicator.h).
//
// `store` is the Store of that group; if it is null, errors name this rank only. The communicator
// shares ownership of both. Throws ValueError if `group` is null.
TRIREME_API std::shared_ptr<Communicator> make_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store);

}  // namespace trireme
