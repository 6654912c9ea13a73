#pragma once

#include <trireme/common/env.h>
#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <optional>
#include <string>

namespace c10d {
class Store;
}

namespace trireme {

struct RendezvousRequest {
  LaunchEnvironment environment;
  // Where the ranks meet. "env://": at MASTER_ADDR:MASTER_PORT. "tcp://host:port": there, rank 0
  // listens unless torchrun's agent already does. "file:///path": in a file that all hosts see,
  // which the last rank removes. Empty: environment.init_method, else env://. A single rank needs
  // no place and ignores it.
  std::string init_method;
  // How long to wait for the other ranks; also the Store's timeout afterwards. Unset: 5 minutes.
  std::optional<std::chrono::milliseconds> timeout;
};

// The meeting of the ranks of one run: a c10d Store, and the end of its life.
//
// The constructor is collective and returns when all ranks have come. It throws c10::ValueError for
// an init_method that cannot be used, and c10::DistBackendError naming host and port when the ranks
// do not find each other or the port is taken.
class TRIREME_API Rendezvous {
 public:
  explicit Rendezvous(const RendezvousRequest& request);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Returns the Store, in which keys of an earlier rendezvous of these ranks do not show.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  // Leaves the Store, as the last thing that a rank does with it. If this rank serves it, waits
  // until every rank has left, so that none loses the Store while it still needs it, but no longer
  // than `patience`. Returns false if a rank had not left, or the Store no longer answered. Calling
  // it again does nothing.
  bool leave(std::chrono::milliseconds patience) noexcept;

 private:
  RankOf where_;
  bool serves_ = false;
  bool left_ = false;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace trireme
