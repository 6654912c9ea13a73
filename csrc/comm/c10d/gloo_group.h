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

struct GlooOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);         // limit of one collective
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(5);  // limit of the beginning
  // The address to which the other ranks connect. Empty: the interfaces in GLOO_SOCKET_IFNAME, else
  // the address that this machine's name resolves to.
  std::string hostname{};
};

// Makes torch's Gloo engine. Collective: every rank of `where.world` calls it with a Store that all
// of them share and that carries no other group's keys (c10d::PrefixStore). Returns when all ranks
// are connected; throws c10::DistBackendError when they are not within connect_timeout. If SIGPIPE
// has no handler, the process ignores it from here on, as Python does: Gloo writes to the sockets
// of peers that may have died, which would end this process without a message.
TRIREME_API c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, RankOf where, const GlooOptions& options = {});

// Makes a process group of that engine alone, for tensors on CPU and CUDA.
TRIREME_API c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(
    const c10::intrusive_ptr<c10d::Store>& store, RankOf where, const GlooOptions& options = {});

}  // namespace trireme
