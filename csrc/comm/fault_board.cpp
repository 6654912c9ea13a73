#include <trireme/comm/fault_board.h>

#include <thread>

namespace trireme {
namespace {

constexpr size_t kLastOperations = 4;
constexpr const char* kFaultCount = "trireme/fault/count";
constexpr const char* kFaultText = "trireme/fault/text";

std::string report_key(int64_t rank) { return "trireme/report/" + std::to_string(rank); }

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// Opens a connection of our own where the Store has connections: another thread of the program may
// sit in a blocking get on the shared one for as long as it likes.
c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store) {
  if (!store) return store;
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // a store of tests that has no clone has no connection to share either
  }
}

}  // namespace

FaultBoard::FaultBoard(c10::intrusive_ptr<c10d::Store> store, RankOf where)
    : store_(own_connection(store)), where_(where) {}

void FaultBoard::note_started(const std::string& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++started_;
  last_operations_.push_back(operation);
  if (last_operations_.size() > kLastOperations) last_operations_.pop_front();
}

void FaultBoard::announce(const std::string& reason) noexcept {
  if (!store_) return;
  try {
    if (store_->add(kFaultCount, 1) == 1) store_->set(kFaultText, to_bytes(reason));
  } catch (...) {  // the peers then learn it from the engine or from their deadline
  }
}

std::optional<std::string> FaultBoard::announced() const noexcept { return posted(kFaultText); }

void FaultBoard::post(const std::string& key, const std::string& words) noexcept {
  if (!store_) return;
  try {
    store_->set(key, to_bytes(words));
  } catch (...) {  // who waits for these words does so in vain, and says so
  }
}

std::optional<std::string> FaultBoard::posted(const std::string& key) const noexcept {
  if (!store_) return std::nullopt;
  try {
    if (store_->check({key})) return to_text(store_->get(key));
  } catch (
      ...) {  // an unreachable Store announces nothing; the caller's wait goes on to its own end
  }
  return std::nullopt;
}

int64_t FaultBoard::count(const std::string& topic) noexcept {
  try {
    return store_ ? store_->add("trireme/" + topic + "/" + std::to_string(where_.rank), 1) : 0;
  } catch (...) {
    return 0;
  }
}

void FaultBoard::withdraw(const std::string& key) noexcept {
  if (!store_) return;
  try {
    store_->deleteKey(key);
  } catch (...) {  // a Store that deletes nothing keeps a few bytes more
  }
}

std::string FaultBoard::own_report(const std::string& waiting_for) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text = "waited for " + waiting_for + "; had started " + std::to_string(started_) +
                     " operations, the last: ";
  for (size_t i = 0; i < last_operations_.size(); ++i) {
    text += (i == 0 ? "" : ", ") + last_operations_[i];
  }
  return text;
}

std::string FaultBoard::exchange_reports(const std::string& waiting_for,
                                         std::chrono::milliseconds patience) noexcept {
  const std::string own = own_report(waiting_for);
  if (!store_) return "This rank " + own;
  try {
    store_->set(report_key(where_.rank), to_bytes(own));
    const auto deadline = std::chrono::steady_clock::now() + patience;
    std::string text = "This rank " + own;
    for (int64_t peer = 0; peer < where_.world; ++peer) {
      if (peer == where_.rank) continue;
      while (!store_->check({report_key(peer)}) && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      text += "; rank " + std::to_string(peer) + " ";
      text += store_->check({report_key(peer)})
                  ? to_text(store_->get(report_key(peer)))
                  : "has left no report (it is dead, or busy outside a collective)";
    }
    return text;
  } catch (...) {
    return "This rank " + own + "; the Store no longer answers";
  }
}

}  // namespace trireme
