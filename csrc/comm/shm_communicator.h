#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/shm_backend_class.h>

#include <memory>

namespace trireme {

// The backend that moves CPU tensors of that group; null if they do not go through shared memory.
c10::intrusive_ptr<ShmBackend> find_shm_backend(c10d::ProcessGroup& group);

// A Communicator of ranks that share the memory of their host (ShmBackend::shares_memory()). Lists
// of CPU tensors go there as they are, one collective per dtype, without flat copies; tensors of
// other devices go through `others`, which belongs to the same group.
//
// As long as only shared memory was used, it recovers from an announced failure.
std::shared_ptr<Communicator> make_shm_communicator(c10::intrusive_ptr<ShmBackend> backend,
                                                    std::shared_ptr<Communicator> others);

}  // namespace trireme
