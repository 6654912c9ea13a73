#pragma once

#include <trireme/comm/backend/shm_backend_class.h>
#include <trireme/comm/communicator.h>

#include <memory>

namespace trireme {

// Makes a Communicator of ranks on several hosts, of which some have more than one, over the
// backend "trireme": memory inside each host, and data that cross between hosts cross once per host
// (see multi_host_collectives.h). A group that fails ends on all hosts, at once, with the reason of
// the first rank that failed; it does not recover.
std::shared_ptr<Communicator> make_hosts_communicator(c10::intrusive_ptr<ShmBackend> backend,
                                                      std::shared_ptr<Communicator> others);

}  // namespace trireme
