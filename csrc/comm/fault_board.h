#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

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

// Is where ranks leave word for each other when the collectives themselves no longer answer: a few
// keys in the Store of their group. Nothing here is on the path of a step that goes well.
//
//   trireme/fault/text        the first announced failure of the group; every waiting rank raises
//                             with it
//   trireme/process/<rank>    which process a rank is, for those of its host
//   trireme/farewell/<rank>   a rank that ended normally, or has no model any more, and after which
//                             step
//   trireme/report/<rank>     what a rank whose wait failed was doing
//   trireme/meeting/...       what ranks say to each other in meeting_place.h
//
// Thread-safe. Nothing here throws: a Store that no longer answers is one more sign, not one more
// error.
class TRIREME_API FaultBoard {
 public:
  FaultBoard(c10::intrusive_ptr<c10d::Store> store, RankOf where);
  ~FaultBoard();
  FaultBoard(const FaultBoard&) = delete;
  FaultBoard& operator=(const FaultBoard&) = delete;

  // Notes the last operations of this rank in a ring, for its own report.
  void note_started(const std::string& operation);
  void note_step(int64_t number, bool is_done) noexcept;
  // Lets both tell of the same steps from now on: that of a group, and that of a part of it.
  void share_steps(const FaultBoard& other) { steps_ = other.steps_; }

  void announce(const std::string& reason) noexcept;
  std::optional<std::string> announced() const noexcept;
  // Tells the peers that this rank's program ends: by that error, or normally if it is empty. The
  // destructor says that the model has gone.
  void leave(const std::string& error) noexcept;

  // Words under a key of the caller's.
  void post(const std::string& key, const std::string& words) noexcept;
  std::optional<std::string> posted(const std::string& key) const noexcept;
  void withdraw(const std::string& key) noexcept;
  // Returns how often this rank has asked about `topic`, of whichever board of the group: its words
  // stay in the Store when a board goes. 0 if the Store does not answer.
  int64_t count(const std::string& topic) noexcept;
  bool has_store() const { return store_ != nullptr; }
  std::chrono::milliseconds timeout() const { return store_->getTimeout(); }

  // Says whether a rank has left, or its process on this host has ended.
  bool has_gone(int64_t rank) const noexcept;
  // Says what is known of the others, those that no longer run first, once all have left word or
  // `patience` is over.
  struct Others {
    std::string text;
    bool all_left_normally = false;  // all of whom something is known
  };
  Others ask_others(const std::string& waiting_for, std::chrono::milliseconds patience) noexcept;
  // Says what this rank was doing.
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
  uint64_t forks_;                       // forks_so_far() when it was made
  std::optional<int64_t> memory_kills_;  // shm::out_of_memory_kills() then
  struct Steps {
    std::atomic<int64_t> begun{0};
    std::atomic<int64_t> done{0};
  };
  std::shared_ptr<Steps> steps_ = std::make_shared<Steps>();
  mutable std::mutex mutex_;
  std::deque<std::pair<std::string, int>> last_operations_;  // what, how often in a row
  int64_t started_ = 0;
  bool has_left_ = false;
};

// Does FaultBoard::leave() on all boards that still live. Of those that do not it is said that this
// rank has ended.
void leave_all_boards(const std::string& error) noexcept;

}  // namespace trireme
