#pragma once

#include <trireme/common/duration.h>
#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
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
  // Limit of making the group: until all ranks have come and, between hosts, Gloo connects them.
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(5);
  std::string hostname{};
  // For tests: ranks with different texts behave as if they were on different hosts.
  std::string host_partition{};
  bool warns = true;  // if ranks are on several hosts; off if the parent group has warned
};

// Returns the connect_timeout of a group that was given one timeout for all: the same. Not less
// than 10 s, since ranks of a busy machine begin long after each other, and a timeout for
// collectives may be short; nor more than a day, since sockets count milliseconds in 32 bits.
inline std::chrono::milliseconds connect_timeout_of(std::chrono::milliseconds timeout) {
  const std::chrono::milliseconds least = std::chrono::seconds(10);
  const std::chrono::milliseconds most = std::chrono::hours(24);
  return std::clamp(saturated(timeout), least, most);
}

// Makes the c10d backend "trireme": collectives of CPU ranks through the memory of their host (see
// shm/collectives.h) and, between hosts, over Gloo (see hosts/multi_host_collectives.h), for any
// program that uses torch.distributed. Collective: every rank of `where.world` calls it with a
// Store that all of them share and that carries no other group's keys.
//
// Synchronous operations run on the caller's thread if nothing is queued; the others run in order,
// on the group's own thread or on one that waits for them (queue.h). Results have the same bits on
// all ranks and in every run. Inputs need not be contiguous: others pass through a copy. Sparse
// sums go by all-gather.
//
// Messages between two ranks (send, recv, also from any rank) go beside the collectives and their
// order; see comm/backend/p2p.h.
//
// Errors: if ranks do not come within connect_timeout, the others raise c10::DistBackendError,
// which names them. A collective on which ranks do not agree raises c10::DistBackendError on all of
// them, naming both sides, and moves nothing; the group goes on. A rank that dies or does not come
// before the deadline ends the group, with the rank and the operation in the text.
TRIREME_API c10::intrusive_ptr<c10d::Backend> make_shm_backend(
    const c10::intrusive_ptr<c10d::Store>& store, RankOf where, const ShmOptions& options = {});

// Tells the peers, at the end of the process, that this rank has left each living group, and by
// which error; an empty `error` is a normal end. At a normal end a group with operations in flight
// is left out: these may still end well.
TRIREME_API void leave_all_groups(const std::string& error);

// Makes a process group of that backend alone, for tensors on CPU.
TRIREME_API c10::intrusive_ptr<c10d::ProcessGroup> make_shm_group(
    const c10::intrusive_ptr<c10d::Store>& store, RankOf where, const ShmOptions& options = {});

}  // namespace trireme
