#pragma once

#include <trireme/common/error.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

namespace trireme {

// Is where ranks leave word for each other when the collectives themselves no longer answer: a few
// keys in the Store of their group. Nothing here is on the path of a step that goes well.
//
//   trireme/fault/text     the first announced failure of the group; every waiting rank raises with
//                          it
//   trireme/report/<rank>  what a rank whose wait failed was doing
//   trireme/meeting/...    what ranks say to each other in meeting_place.h
//
// Thread-safe. Nothing here throws: a Store that no longer answers is one more sign, not one more
// error.
class FaultBoard {
 public:
  FaultBoard(c10::intrusive_ptr<c10d::Store> store, RankOf where);

  // Notes the last operations of this rank in a ring, for its own report.
  void note_started(const std::string& operation);

  void announce(const std::string& reason) noexcept;
  std::optional<std::string> announced() const noexcept;

  // Words under a key of the caller's.
  void post(const std::string& key, const std::string& words) noexcept;
  std::optional<std::string> posted(const std::string& key) const noexcept;
  void withdraw(const std::string& key) noexcept;
  // Returns how often this rank has asked about `topic`, of whichever board of the group: its words
  // stay in the Store when a board goes. 0 if the Store does not answer.
  int64_t count(const std::string& topic) noexcept;
  bool has_store() const { return store_ != nullptr; }
  std::chrono::milliseconds timeout() const { return store_->getTimeout(); }

  // Posts this rank's report, then gathers what the others report within `patience` into one
  // paragraph.
  std::string exchange_reports(const std::string& waiting_for,
                               std::chrono::milliseconds patience) noexcept;

 private:
  std::string own_report(const std::string& waiting_for) const;

  c10::intrusive_ptr<c10d::Store> store_;
  RankOf where_;
  mutable std::mutex mutex_;
  std::deque<std::string> last_operations_;
  int64_t started_ = 0;
};

}  // namespace trireme
