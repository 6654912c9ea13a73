#include <trireme/comm/fault_board.h>

#include <trireme/common/fork_guard.h>
#include <trireme/shm/fault.h>
#include <trireme/shm/liveness.h>
#include <trireme/shm/operation.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <thread>
#include <unistd.h>

namespace trireme {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLastOperations = 4;
constexpr const char* kFaultCount = "trireme/fault/count";
constexpr const char* kFaultText = "trireme/fault/text";
constexpr const char* kFarewells = "trireme/farewells";
const std::string kEnded = "ended";
const std::string kFailed = "was ended";
const std::string kModelGone = "let its model go";
// How long a rank that has left may take to end, and to show its exit code.
constexpr std::chrono::seconds kExit{2};
// How long a message may be on its way after its writer has ended.
constexpr std::chrono::milliseconds kLastWord{200};

std::string key_of(const char* what, int64_t rank) {
  return std::string("trireme/") + what + "/" + std::to_string(rank);
}

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// Opens another connection if the Store has connections: a thread of the program may block the
// shared one in a get for as long as it likes.
c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store) {
  if (!store) return store;
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // a store of tests that has no clone has no connection to share either
  }
}

// Returns what another rank needs to find this process, if it runs on the same host.
std::string own_process() {
  return std::to_string(::getpid()) + " " + shm::start_of(::getpid()) + " " + shm::pid_namespace() +
         " " + shm::host_boot();
}

// Returns " after step 9" of "ended after step 9".
std::string step_in(const std::string& farewell) {
  const size_t place = std::min(farewell.find(" after "), farewell.find(" in "));
  return place == std::string::npos ? std::string() : farewell.substr(place);
}

struct LivingBoards {
  std::mutex mutex;
  std::set<FaultBoard*> all;

  // The message that a destroyed board leaves for the end of the process.
  struct LastWord {
    c10::intrusive_ptr<c10d::Store> store;
    std::string key;
    std::string step;
    ForkGuard fork_guard;
  };
  std::deque<LastWord> last_words;  // the newest at the end
  static constexpr size_t kMostLastWords = 8;
};
LivingBoards& living_boards() {
  static auto* living = new LivingBoards;
  return *living;
}

}  // namespace

// The process of a rank, as far as this rank can look at it.
struct FaultBoard::Process {
  pid_t pid = 0;
  std::string state;  // empty if it cannot be looked at: it runs elsewhere
  std::optional<int> wait_status = std::nullopt;

  bool is_gone() const { return state == "gone"; }
};

FaultBoard::Process FaultBoard::look_at(const std::string& told) {
  std::istringstream fields(told);
  Process process;
  std::string start, space, boot;
  fields >> process.pid >> start >> space >> boot;
  if (start.empty() || space != shm::pid_namespace() || boot != shm::host_boot()) return process;
  try {
    process.state = "gone";
    if (shm::start_of(process.pid) != start) return process;
    const shm::PeerProcess peer(process.pid);
    process.state = peer.state();
    process.wait_status = peer.wait_status();
  } catch (const shm::Fault&) {  // it went in this moment
  }
  return process;
}

FaultBoard::FaultBoard(c10::intrusive_ptr<c10d::Store> store, RankOf where)
    : store_(own_connection(store)), where_(where), memory_kills_(shm::out_of_memory_kills()) {
  if (!store_) return;
  try {
    store_->set(key_of("process", where_.rank), to_bytes(own_process()));
    store_->deleteKey(key_of("farewell", where_.rank));  // an earlier model's
  } catch (...) {                                        // the peers know less, then
  }
  const std::lock_guard<std::mutex> lock(living_boards().mutex);
  living_boards().all.insert(this);
}

FaultBoard::~FaultBoard() {
  LivingBoards& living = living_boards();
  const std::lock_guard<std::mutex> lock(living.mutex);
  living.all.erase(this);
  if (!is_missed()) return;
  try {
    const std::string key = key_of("farewell", where_.rank);
    store_->set(key, to_bytes(kModelGone + step()));
    living.last_words.push_back({store_, key, step(), fork_guard_});
    if (living.last_words.size() > LivingBoards::kMostLastWords) living.last_words.pop_front();
  } catch (...) {  // nobody serves the Store any more
  }
}

// Returns whether peers may wait for this rank by the group of this board.
bool FaultBoard::is_missed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return store_ && !fork_guard_.in_child() && started_ > 0 && !has_left_ && where_.world > 1;
}

void FaultBoard::note_started(const std::string& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++started_;
  if (!last_operations_.empty() && last_operations_.back().first == operation) {
    ++last_operations_.back().second;
    return;
  }
  last_operations_.emplace_back(operation, 1);
  if (last_operations_.size() > kLastOperations) last_operations_.pop_front();
}

void FaultBoard::note_step(int64_t number, bool is_done) noexcept {
  std::atomic<int64_t>& counter = is_done ? steps_->done : steps_->begun;
  if (number > counter) counter = number;
}

std::string FaultBoard::step() const {
  return shm::step_text(static_cast<uint64_t>(steps_->begun.load()),
                        static_cast<uint64_t>(steps_->done.load()));
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
  } catch (...) {  // a rank that waits for these words gives up in time, and says so
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

void FaultBoard::leave(const std::string& error) noexcept {
  if (!is_missed()) return;
  try {
    if (!error.empty()) {
      announce(error_text("comm", "the program of this rank was ended" + step() + " by " + error,
                          where_, "Look for the error of that rank."));
    } else {
      store_->set(key_of("farewell", where_.rank), to_bytes(kEnded + step()));
    }
    store_->add(kFarewells, 1);  // answered: so what was written before has arrived
    const std::lock_guard<std::mutex> lock(mutex_);
    has_left_ = true;
  } catch (...) {  // nobody serves the Store any more
  }
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
  std::string text = "waited" + step() + " for " + waiting_for + "; had started " +
                     std::to_string(started_) + " operations, the last: ";
  for (size_t i = 0; i < last_operations_.size(); ++i) {
    const auto& [operation, times] = last_operations_[i];
    text += (i == 0 ? "" : ", ") + operation;
    if (times > 1) text += " (" + std::to_string(times) + " times)";
  }
  return text;
}

std::optional<std::string> FaultBoard::read(const char* what, int64_t rank) const {
  const std::string key = key_of(what, rank);
  if (!store_->check({key})) return std::nullopt;
  return to_text(store_->get(key));
}

// The known state of an awaited rank.
struct FaultBoard::Word {
  enum class Kind : uint8_t { kLeft, kLost, kOther };
  std::string text;
  Kind kind = Kind::kOther;
};

FaultBoard::Word FaultBoard::farewell_of(const std::string& name, const std::string& farewell,
                                         const Process& process) const {
  if (process.wait_status.value_or(0) != 0) {
    return {name + " has left" + step_in(farewell) +
                shm::text_of_end(process.wait_status, memory_kills_),
            Word::Kind::kLost};
  }
  if (farewell.starts_with(kFailed)) return {name + " " + farewell, Word::Kind::kLost};
  const bool has_ended = farewell.starts_with(kEnded);
  const std::string deed = has_ended ? " ended normally" + farewell.substr(kEnded.size())
                                     : " " + farewell + (process.is_gone() ? ", and ended" : "");
  return {name + deed, Word::Kind::kLeft};
}

// Returns at the latest when the deadline and the time that an exit takes have passed.
FaultBoard::Word FaultBoard::word_of(int64_t peer, Clock::time_point deadline) const {
  using Kind = Word::Kind;
  const auto told = read("process", peer);
  std::optional<Clock::time_point> ends_by;
  for (;;) {
    const Process process = told ? look_at(*told) : Process();
    if (process.is_gone()) deadline = std::min(deadline, Clock::now() + kLastWord);
    const bool is_last_look = Clock::now() >= deadline;
    std::string name = "rank " + std::to_string(peer);
    if (process.pid != 0) name += " (process " + std::to_string(process.pid) + ")";
    if (const auto farewell = read("farewell", peer)) {
      if (!ends_by) ends_by = std::min(Clock::now(), deadline) + kExit;
      if (process.is_gone() || process.state.empty() || Clock::now() >= *ends_by)
        return farewell_of(name, *farewell, process);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      continue;
    }
    if (const auto report = read("report", peer)) return {name + " " + *report, Kind::kOther};
    if (is_last_look && process.is_gone()) {
      const std::string end = shm::text_of_end(process.wait_status, memory_kills_);
      return {name + " has died and left no word" +
                  (end.empty() ? " (killed? out of memory? see dmesg)" : end),
              Kind::kLost};
    }
    if (is_last_look) {
      return {name + " has left no report (it is " +
                  (process.state.empty() ? "dead, or" : "alive, " + process.state + ", and") +
                  " busy outside a collective)",
              Kind::kOther};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

bool FaultBoard::has_gone(int64_t rank) const noexcept {
  if (!store_) return false;
  try {
    if (store_->check({key_of("farewell", rank)})) return true;
    const auto told = read("process", rank);
    return told && look_at(*told).is_gone();
  } catch (...) {  // no answer is one more sign, which the caller's own deadline reads
    return false;
  }
}

bool FaultBoard::has_left_no_word(int64_t rank) const noexcept {
  if (!store_) return false;
  try {
    return !store_->check({key_of("farewell", rank)});
  } catch (...) {  // the rank that serves the Store may have left in order
    return false;
  }
}

FaultBoard::Others FaultBoard::ask_others(const std::string& waiting_for,
                                          std::chrono::milliseconds patience) noexcept {
  Others others;
  if (!store_) return others;
  try {
    store_->set(key_of("report", where_.rank), to_bytes(own_report(waiting_for)));
    const auto deadline = Clock::now() + patience;
    std::string gone, here;
    bool is_any_lost = false;
    for (int64_t peer = 0; peer < where_.world; ++peer) {
      if (peer == where_.rank) continue;
      const Word word = word_of(peer, deadline);
      std::string& text = word.kind == Word::Kind::kOther ? here : gone;
      text += (text.empty() ? "" : "; ") + word.text;
      is_any_lost = is_any_lost || word.kind == Word::Kind::kLost;
    }
    others.text = gone + (gone.empty() || here.empty() ? "" : "; ") + here;
    others.all_left_normally = !gone.empty() && !is_any_lost;
  } catch (...) {
    others.text += "the Store no longer answers (the rank that serves it may have ended)";
  }
  return others;
}

void leave_all_boards(const std::string& error) noexcept {
  LivingBoards& living = living_boards();
  const std::lock_guard<std::mutex> lock(living.mutex);
  for (const LivingBoards::LastWord& word : living.last_words) {
    if (word.fork_guard.in_child()) continue;
    try {
      word.store->set(word.key, to_bytes(error.empty() ? kEnded + word.step
                                                       : kFailed + word.step + " by " + error));
      word.store->add(kFarewells, 1);
    } catch (...) {  // nobody serves the Store any more
    }
  }
  living.last_words.clear();
  for (FaultBoard* board : living.all) board->leave(error);
}

}  // namespace trireme
