#pragma once

#include <trireme/comm/backend/shm_backend_class.h>
#include <trireme/comm/communicator.h>

#include <memory>

namespace trireme {

// Returns the backend that moves CPU tensors of that group; null if they do not go through shared
// memory, at least inside some of the hosts.
c10::intrusive_ptr<ShmBackend> find_shm_backend(c10d::ProcessGroup& group);

// Makes a Communicator over that backend (backend/verbs.h); `others`, of the same group, is for
// tensors of other devices. If all ranks share the memory of a host it recovers from an announced
// failure, unless `others` was used; on several hosts see hosts_communicator.h.
std::shared_ptr<Communicator> make_shm_communicator(c10::intrusive_ptr<ShmBackend> backend,
                                                    std::shared_ptr<Communicator> others);

}  // namespace trireme
