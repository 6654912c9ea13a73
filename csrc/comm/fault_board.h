#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace trireme {

// Failure messages between ranks through the Store of their group, used when collectives no longer
// answer: a few keys. A step that goes well does not touch them.
//
//   trireme/fault/text        the first announced failure of the group; every waiting rank raises
//                             with it
//   trireme/process/<rank>    the process of a rank, for ranks of the same host
//   trireme/farewell/<rank>   how a rank ended, or that its model is gone, and after which step
//   trireme/report/<rank>     what a rank whose wait failed was doing
//   trireme/meeting/...       the exchanges of meeting_place.h
//
// Thread-safe. Nothing here throws: a Store that no longer answers is one more sign, not one more
// error.
class TRIREME_API FaultBoard {
 public:
  FaultBoard(c10::intrusive_ptr<c10d::Store> store, RankOf where);
  ~FaultBoard();
  FaultBoard(const FaultBoard&) = delete;
  FaultBoard& operator=(const FaultBoard&) = delete;

  // Notes this rank's last operations, for its own report.
  void note_started(const std::string& operation);
  void note_step(int64_t number, bool is_done) noexcept;
  // Takes its step numbers from `other` from now on: a group and a part of it count the same steps.
  void share_steps(const FaultBoard& other) { steps_ = other.steps_; }

  void announce(const std::string& reason) noexcept;
  std::optional<std::string> announced() const noexcept;
  // Tells the peers that this rank's program ends: by `error`, or normally if that is empty. The
  // destructor tells them that the model is gone.
  void leave(const std::string& error) noexcept;

  // Write, read and delete texts under keys that the caller chooses.
  void post(const std::string& key, const std::string& words) noexcept;
  std::optional<std::string> posted(const std::string& key) const noexcept;
  void withdraw(const std::string& key) noexcept;
  // Returns how often this rank has asked about `topic`, through any board of the group: the count
  // stays in the Store when a board goes. 0 if the Store does not answer.
  int64_t count(const std::string& topic) noexcept;
  bool has_store() const { return store_ != nullptr; }
  std::chrono::milliseconds timeout() const { return store_->getTimeout(); }

  // Returns whether a rank has left, or its process on this host has ended.
  bool has_gone(int64_t rank) const noexcept;
  // Returns whether the Store answers, and has no word of that rank that it has left.
  bool has_left_no_word(int64_t rank) const noexcept;
  // The known state of the other ranks, those that no longer run first. ask_others() returns it
  // once all have left a message, or `patience` is over.
  struct Others {
    std::string text;
    bool all_left_normally = false;  // all ranks of which something is known
  };
  Others ask_others(const std::string& waiting_for, std::chrono::milliseconds patience) noexcept;
  // Returns what this rank was doing.
  std::string own_report(const std::string& waiting_for) const;

 private:
  std::string step() const;
  bool is_missed() const;
  std::optional<std::string> read(const char* what, int64_t rank) const;
  struct Process;
  struct Word;
  static Process look_at(const std::string& told);
  Word farewell_of(const std::string& name, const std::string& farewell,
                   const Process& process) const;
  Word word_of(int64_t peer, std::chrono::steady_clock::time_point deadline) const;

  c10::intrusive_ptr<c10d::Store> store_;
  RankOf where_;
  ForkGuard fork_guard_;
  std::optional<int64_t> memory_kills_;  // shm::out_of_memory_kills() when this was made
  struct Steps {
    std::atomic<int64_t> begun{0};
    std::atomic<int64_t> done{0};
  };
  std::shared_ptr<Steps> steps_ = std::make_shared<Steps>();
  mutable std::mutex mutex_;
  std::deque<std::pair<std::string, int>> last_operations_;  // name, how often in a row
  int64_t started_ = 0;
  bool has_left_ = false;
};

// Calls FaultBoard::leave() on all living boards, and reports the end of this rank under the keys
// of the last boards that were destroyed.
void leave_all_boards(const std::string& error) noexcept;

}  // namespace trireme
