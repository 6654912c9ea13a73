#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/message_box.h>
#include <trireme/comm/name_book.h>
#include <trireme/common/export.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace trireme {

// How long an operation may wait for ranks that have not issued it.
struct NamedOrderOptions {
  std::chrono::milliseconds report_after{60'000};      // then rank 0 says so, once
  std::chrono::milliseconds give_up_after{1'800'000};  // ranks of a host: the group's timeout
};

// Puts the named operations of all ranks into one order (name_book.h). Rank 0 has the book; a
// thread of each rank carries messages. Thread-safe.
class TRIREME_API NamedOrder {
 public:
  // Nobody else uses the communicator. Collective; throws what MessageBox does.
  NamedOrder(std::shared_ptr<Communicator> communicator, NamedOrderOptions options);
  ~NamedOrder();
  NamedOrder(const NamedOrder&) = delete;
  NamedOrder& operator=(const NamedOrder&) = delete;

  // Says that this rank has issued an operation. Does not wait. Throws c10::DistBackendError if a
  // rank is gone.
  void announce(NamedOperation operation);
  // Says on rank 0 who is in a set; does nothing elsewhere.
  void define_set(int64_t set, std::vector<int64_t> ranks);
  static constexpr const char* kReport = "report";
  // Returns what this rank does next; waits for it. On rank 0 it may be a report: of kind kReport,
  // with a line about ranks that let others wait as its error. Returns nothing after close().
  // Throws c10::DistBackendError naming the rank, if one is gone; then and from then on.
  std::optional<AgreedOperation> next();
  // Ends next() in other threads, and this rank's part of the order.
  void close();

 private:
  void run();
  bool poll();
  void look();
  void handle(int64_t from, const std::string& text);
  void tell(const std::vector<NameBook::Decision>& decisions);
  void receive(AgreedOperation agreed);
  void post(int64_t to, std::string text);
  bool flush();
  void end_with(const std::string& why);
  void wait_until_posted();
  void watch_waiting();

  RankOf where_;
  std::shared_ptr<Communicator> communicator_;
  NamedOrderOptions options_;
  std::unique_ptr<MessageBox> box_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable came_;
  std::unique_ptr<NameBook> book_;  // of rank 0
  std::deque<AgreedOperation> agreed_;
  std::deque<std::pair<int64_t, std::string>> outbox_;
  std::deque<std::string> reports_;
  std::vector<std::pair<int64_t, std::string>> reported_;  // set and name of what was reported
  std::string failure_;
  bool closed_ = false;

  std::atomic<bool> stops_{false};
  std::thread thread_;
};

}  // namespace trireme
