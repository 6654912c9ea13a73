#pragma once

#include <trireme/comm/fault_board.h>
#include <trireme/comm/pending.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace trireme {

// What the operations of one c10d group share: whether it still works, and whom to ask if not.
struct GroupHealth {
  GroupHealth(c10::intrusive_ptr<c10d::Store> store, RankOf where)
      : board(std::move(store), where), where(where) {}

  FaultBoard board;
  RankOf where;

  std::optional<std::string> failure() const;
  void set_failure(const std::string& text);
  void clear_failure();
  // Throws the DistBackendError of a group that has failed before.
  void check_usable(const std::string& operation) const;
  // Whether it is time to look at the board, for who does not wait himself: once a second.
  bool is_look_due();

 private:
  mutable std::mutex mutex_;
  std::optional<std::string> failure_;
  std::atomic<std::chrono::steady_clock::rep> looked_at_{0};
};

class Communicator;

// A communicator that shares its health with its Pendings.
struct HasGroupHealth {
  virtual ~HasGroupHealth() = default;
  virtual const std::shared_ptr<GroupHealth>& health() const = 0;
};

// That health. A communicator that has none (a test's) gets a fresh one without a Store, which
// watches nothing.
std::shared_ptr<GroupHealth> health_of(const Communicator& communicator);

// Runs `call`; whatever it throws is thrown again as a c10::DistBackendError naming `operation`.
void rethrow_named(const std::string& operation, GroupHealth& health,
                   const std::function<void()>& call);

// Waits for `work`, watching what peers announce; throws c10::DistBackendError naming `operation`.
void wait_for_work(c10d::Work& work, bool on_cpu, const std::string& operation,
                   GroupHealth& health);

// The same for the Future that a communication hook returned.
void wait_for_future(c10::ivalue::Future& future, const std::string& operation,
                     GroupHealth& health);

}  // namespace trireme
