#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/message_box.h>
#include <trireme/comm/name_book.h>
#include <trireme/comm/shared_log.h>
#include <trireme/common/export.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace trireme {

// How long an operation may wait for ranks that have not issued it.
struct NamedOrderOptions {
  std::chrono::milliseconds report_after{60'000};   // then rank 0 says so, once
  std::chrono::milliseconds fail_after{1'800'000};  // ranks of a host: the group's timeout
};

// [Note: who keeps the book of names]
//
// Ranks of one host append what they issue to a log in shared memory (shared_log.h). Each reads all
// of it in one order and has a book of its own, so all books decide alike: no rank is asked, and no
// message is sent. A call that waits for its operation reads the log itself. On several hosts rank
// 0 has the book; a thread of each rank carries messages to and from it.

// Puts the named operations of all ranks into one order (name_book.h). Thread-safe.
class TRIREME_API NamedOrder {
 public:
  // Nobody else uses the communicator. Collective; throws what MessageBox does.
  NamedOrder(std::shared_ptr<Communicator> communicator, NamedOrderOptions options);
  ~NamedOrder();
  NamedOrder(const NamedOrder&) = delete;
  NamedOrder& operator=(const NamedOrder&) = delete;

  // Says that this rank has issued an operation. Does not wait. Throws c10::DistBackendError if a
  // rank is gone.
  void announce(const NamedOperation& operation);
  // Says on rank 0 who is in a set; does nothing elsewhere.
  void define_set(int64_t set, std::vector<int64_t> ranks);

  // Threads that run operations take turns; a turn lasts until the operation has run. One of them
  // runs what comes while nobody waits: it calls wait_for_next(), and next() in its turn.

  // Waits until there is a report, or next() has something to return or to throw and no thread is
  // between begin_turn() and end_turn(). Returns false after close(), once all was taken.
  bool wait_for_next();
  // Returns, on rank 0, a line about ranks that let others wait. Needs no turn.
  std::optional<std::string> take_report();
  // Returns what this rank does next; nothing if another thread has done that. Throws
  // c10::DistBackendError naming the rank, if one is gone; then and from then on.
  std::optional<AgreedOperation> next();

  // Lets the calling thread run what comes until end_turn(). Returns false where it cannot: it then
  // waits for the thread that can.
  bool begin_turn();
  // Returns what next() would, as soon as there is something; nothing after some 50 ms, in which
  // the caller may look for signals, and after close(). Throws what next() does.
  std::optional<AgreedOperation> next_in_turn();
  void end_turn();

  // Ends waits in other threads, and this rank's part of the order.
  void close();

 private:
  // By messages.
  void run();
  void post(int64_t to, std::string text);
  bool flush();
  // By the log.
  void read_until_next();
  void append(const NamedOperation& operation);
  void take_in(int64_t from, const std::string& text);
  void fail_as_said(const NamedOperation& said);
  void show_reader();
  std::vector<std::string> absences() const;

  bool poll();
  void look();
  void end_if_gone(const std::vector<int64_t>& ranks, const std::vector<std::string>& why);
  void handle(int64_t from, const std::string& text);
  void tell(const std::vector<NameBook::Decision>& decisions);
  void receive(AgreedOperation agreed);
  bool has_next() const;
  AgreedOperation take_first();
  void wake_own();
  void end_with(const std::string& why);
  void wait_until_posted();
  void watch_waiting();
  void fail(const NameBook::Waiting& waiting, const std::string& why);

  RankOf where_;
  std::shared_ptr<Communicator> communicator_;
  NamedOrderOptions options_;
  std::chrono::microseconds patience_;  // of waits, before they sleep
  std::unique_ptr<SharedLog> log_;      // of ranks of one host
  std::unique_ptr<MessageBox> box_;     // of others

  std::mutex mutex_;  // guards what follows
  std::condition_variable came_;
  std::unique_ptr<NameBook> book_;  // of rank 0, and of all ranks of one host
  std::deque<AgreedOperation> agreed_;
  std::multiset<std::pair<int64_t, std::string>> in_flight_;  // what this rank has issued
  std::deque<std::pair<int64_t, std::string>> outbox_;
  std::deque<std::string> reports_;
  std::vector<std::pair<int64_t, std::string>> reported_;  // set and name of what was reported
  std::string failure_;
  bool closed_ = false;
  bool has_turn_ = false;  // a thread is between begin_turn() and end_turn()

  std::atomic<bool> stops_{false};
  std::thread thread_;
};

}  // namespace trireme
