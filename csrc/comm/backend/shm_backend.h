#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace trireme {

struct ShmOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  // limit of one collective
  // Where ranks turn out to be on several hosts, Gloo connects these; see GlooOptions.
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(5);
  std::string hostname{};
  // Tests set it: ranks that say different texts behave as if they were on different hosts.
  std::string host_partition{};
  bool warns = true;  // where ranks are on several hosts; off where the group that it is of has
};

// Makes the c10d backend "trireme": collectives of CPU ranks through the memory of their host (see
// shm/collectives.h) and, between hosts, over Gloo (see hosts/multi_host_collectives.h), for any
// program that uses torch.distributed. Collective: every rank of `where.world` calls it with a
// Store that all of them share and that carries no other group's keys.
//
// A synchronous operation runs on the caller's thread if nothing is queued; the others run in order
// on one thread that the first of them starts. Results have the same bits on all ranks and in every
// run. Inputs need not be contiguous: what is not passes through a copy. Sparse sums go by
// all-gather.
//
// Messages between two ranks (send, recv, also from any rank) go beside the collectives and their
// order; see comm/backend/p2p.h.
//
// Errors: what ranks do not agree about raises c10::DistBackendError on all of them, naming both
// sides, and moves nothing; the group goes on. A rank that dies or does not come before the
// deadline ends the group, with the rank and the operation in the text.
TRIREME_API c10::intrusive_ptr<c10d::Backend> make_shm_backend(
    const c10::intrusive_ptr<c10d::Store>& store, RankOf where, const ShmOptions& options = {});

// Serves the end of the process: peers that wait for this rank hear that it has left each group
// which still lives, and by which error, if not in good order (empty). A group that has operations
// in flight in good order is left out: these may still end well.
TRIREME_API void leave_all_groups(const std::string& error);

// Makes a process group of that backend alone, for tensors on CPU.
TRIREME_API c10::intrusive_ptr<c10d::ProcessGroup> make_shm_group(
    const c10::intrusive_ptr<c10d::Store>& store, RankOf where, const ShmOptions& options = {});

}  // namespace trireme
