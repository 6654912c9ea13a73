#pragma once

#include <trireme/comm/c10d/connection_watch.h>
#include <trireme/comm/c10d/gloo_group.h>
#include <trireme/comm/hosts/host_layout.h>
#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/shm/flag_wait.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace trireme {

// The error that a leg ended before the message. Its text is a part of a sentence.
class TRIREME_API LegBroken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// This rank's end of a leg (see host_layout.h): messages to and from the ranks of the other hosts
// that have the same place there, over a Gloo group of their own. Between two ranks messages arrive
// in the order in which both have posted them; Gloo's thread moves them meanwhile.
//
// While a rank waits here, a thread of the leg checks, as often as a wait in shared memory does,
// whether another rank of the host has given the group up, and whether the connection still holds.
//
// One thread at a time, but close() from any.
class TRIREME_API HostLeg {
 public:
  // Returns whether the group has failed, as far as this host knows. Any thread may call it.
  using Pointless = std::function<bool()>;

  // Messages on their way; without a leg, if it is null, there are none. Their memory must stay as
  // it is until land(), or as long as this lives.
  class Flight {
   public:
    explicit Flight(HostLeg* leg);
    ~Flight();
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

   private:
    friend class HostLeg;
    struct Message {
      c10::intrusive_ptr<c10d::Work> work;
      int64_t host;
    };
    HostLeg* leg_;
    std::vector<Message> messages_;
  };

  // Collective over the ranks of this leg. `store` is that of the whole group. Throws
  // c10::DistBackendError if they cannot connect.
  HostLeg(const c10::intrusive_ptr<c10d::Store>& store, const HostLayout& layout,
          const GlooOptions& options, Pointless pointless);
  ~HostLeg();
  HostLeg(const HostLeg&) = delete;
  HostLeg& operator=(const HostLeg&) = delete;

  // Do nothing for 0 bytes. Throw LegBroken. Where both are due, recv() comes first: Gloo tells the
  // sender that the memory is there behind all that was sent before, for which the sender's
  // direction of the link would lie idle.
  void send(Flight& flight, int64_t host, const std::byte* data, int64_t bytes);
  void recv(Flight& flight, int64_t host, std::byte* data, int64_t bytes);
  // Waits until all messages have arrived and been sent; throws LegBroken.
  void land(Flight& flight, shm::Clock::time_point deadline);

  // Makes waits at all ends of the leg raise.
  void close() noexcept;

 private:
  void keep_watch();
  c10::intrusive_ptr<c10d::Work> post_unanswered(int64_t host);
  void show_awaited(const Flight::Message* message);
  std::string wait_for(const Flight::Message& message, shm::Clock::time_point deadline);
  void post(Flight& flight, int64_t host, std::byte* data, int64_t bytes, bool sends);
  std::string name_of(int64_t host) const;

  const HostLayout& layout_;
  ForkGuard fork_guard_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> gloo_;  // null once closed
  std::set<Flight*> flights_;
  Pointless pointless_;
  ConnectionWatch connections_;               // [host]
  const Flight::Message* awaited_ = nullptr;  // that this rank waits for
  std::string why_broken_;                    // the watcher has ended its wait
  bool ending_ = false;
  bool watcher_sleeps_ = false;  // until it is woken: no rank has waited for some time
  std::condition_variable changed_;
  std::thread watcher_;
};

}  // namespace trireme
